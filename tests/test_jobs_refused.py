"""In: words of `codescent launch`. Out: what does not fit is refused with what would, in one message, and nothing is
written. Does not write scripts: test_jobs_scripts.py does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts import CONFIG, GPUS, PBS, SLURM

from codescent.jobs import address
from codescent.record import RunFolder
from codescent.verbs import cli

POD = ("--to", "kubernetes", "--devices", "2", "site.image=x")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus.txt").write_text("a text " * 1000)
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "slurm"], ["site.time=04:00:00", "site.devices=none", "--devices N"]),
        (["--to", "pbs", "--devices", "4"], ['site.devices="ngpus={n}"']),
        (["--to", "mpirun", "--hosts", "a:2"], ["site.mpi=openmpi, mpich or intelmpi"]),
        (["--to", "kubernetes", "--devices", "1"], ["site.image="]),
        ([*SLURM, GPUS, "--hosts", "a:2"], ["with --to slurm the scheduler chooses the machines"]),
        (["--to", "ssh", "--devices", "2"], ["--to ssh needs the names of the machines: --hosts node1:4,node2:4"]),
        (["--to", "torchrun", "--nodes", "2", "--devices", "2"], ["--to torchrun needs the names of the machines"]),
        (["--to", "ssh", "--hosts", "a:2,a:1,b:x"], ["a is named twice", 'b has "x" slots']),
        (["--to", "ssh", "--hosts", "a,b:1.5,c:0"], ["a has no slots; write a:N", 'b has "1.5" slots', 'c has "0"']),
        (["--to", "ssh", "--hosts", "n1:2,N1:2"], ["N1 is named twice"]),
        (
            ["--to", "ssh", "--hosts", f"fe80::1%eth0:2,[::1]:2,a..b:1,{'x' * 64}:1"],
            [
                'given "fe80::1%eth0:2"; addresses of IPv6 are not taken',
                'given "[::1]:2"; addresses of IPv6',
                'given "a..b:1"; write HOST:SLOTS',
                f'given "{"x" * 64}:1"; write HOST:SLOTS',
                "1 to 63 characters",
            ],
        ),
        (["--to", "ssh", "--hosts", f"n1:{'9' * 5000}"], [f'n1 has "{"9" * 76}... slots; its number', "1,000,000"]),
        (["--to", "ssh", "--hosts", "n1:900000,n2:900000"], ["--hosts: 1800000 ranks: more than anybody has"]),
        ([*SLURM[:3], "100000000", *SLURM[4:], GPUS], ["--nodes and --devices: 400000000 ranks: more than anybody"]),
        (["--to", "ssh", "--hosts", "d e:1"], ['given "d e:1"; write HOST:SLOTS']),
        (["--to", "ssh", "--hosts", "a:2", "--nodes", "1"], ["leave out --nodes and --devices"]),
        (["--to", "local", "--nodes", "2", "--devices", "1"], ["--to local is this machine"]),
        ([*SLURM[:3], "1:4", *SLURM[4:], GPUS], ["only --to torchrun takes nodes that come and go"]),
        (["--to", "torchrun", "--nodes", "1:4", "--devices", "2"], ["--hosts with one name or address"]),
        ([*SLURM, GPUS, "--max-restarts", "3"], ["--max-restarts: --to slurm has no agent"]),
        (["--to", "kubernetes", "--devices", "1", "--max-restarts", "3"], ["--max-restarts: --to kubernetes"]),
        ([*PBS, "--times", "3"], ["only jobs of SLURM follow each other"]),
        ([*SLURM, GPUS, "site.tme=1"], ["did you mean site.time?"]),
        ([*SLURM, GPUS, "--site", "lab"], ["no such file; write sites/NAME.toml"]),
        ([*SLURM, GPUS, "--site", "a\nerror: b\x1b"], ['error: --site "a\\nerror: b\\u001b": no such file']),
        ([*SLURM, GPUS, "parallel.tp=3"], ["tp"]),
        (
            [*SLURM, GPUS, "survive.on_loss=restart", "checkpoint.every=5"],
            ['survive.on_loss = "restart": --to slurm starts ranks that only slurm may start again; take --to local'],
        ),
        (
            ["--to", "ssh", "--hosts", "a:2,b:2", "survive.on_loss=restart", "checkpoint.every=0"],
            ['survive.on_loss = "restart": checkpoint.every = 0, so a restart would begin with the first step'],
        ),
        (
            [
                *("--to", "ssh", "--hosts", "a:2,b:2", "parallel.servers=1", "parallel.updates=asynchronous"),
                "parallel.restarts=2",
            ],
            ["parallel.restarts = 2: only `codescent train --ranks` starts a worker again, no script does"],
        ),
        ([*SLURM, GPUS, "site.time=00:01:00"], ["site.time=00:01:00 (command line): the run saves 60 s before it"]),
        ([*SLURM, GPUS, "site.memory=64GB"], ["site.memory", "such as 64G"]),
        ([*SLURM, GPUS, 'site.options=["--comment=\\"a"]'], ["site.options", "quotes must be closed"]),
        ([*SLURM, GPUS, 'site.options=["--gres=gpu:4"]'], ["(command line: --gres=gpu:4) both ask for devices"]),
        *(
            ([*SLURM, GPUS, f'site.options=["{option}"]'], [f"(command line: {option}) both ask for devices"])
            for option in ("-G 4", "-G4", "--gres gpu:2", "--tres-per-node=gres/gpu:4", "--tres-per-task gres/gpu:1")
        ),
        ([*SLURM, "site.devices=ngpus={n}"], ['"ngpus={n}" is not a form of slurm', '"--gpus-per-node={n}"']),
        ([*PBS[:-1], "site.devices=--gpus={n}"], ['"--gpus={n}" is not a form of pbs', '"ngpus={n}"']),
        ([*POD, "site.devices=--gpus={n}"], ["is not a form of kubernetes", '"nvidia.com/gpu: {n}"']),
        ([*POD, "site.devices=ngpus={n}"], ["is not a form of kubernetes"]),
        ([*SLURM, "site.devices=--gres='gpu:{n}"], ["site.devices", "quotes must be closed: --gres='gpu:{n}"]),
        ([*PBS[:-1], "site.devices=ngpus={n}\ntouch x"], ["site.devices", "must be printable Unicode text"]),
        ([*POD, GPUS, "site.volume=a:/b\nc"], ["site.volume", "must be printable Unicode text"]),
        ([*PBS, 'site.options=["-l gpus=4"]'], ["(command line: -l gpus=4) both ask for devices"]),
        ([*SLURM, GPUS, 'site.options=["--exclusive -G 4"]'], ["-G 4) both ask for devices"]),
        ([*SLURM, GPUS, 'site.options=["--gres=lustre:1,gpu:4"]'], ["both ask for devices"]),
        ([*SLURM, GPUS, 'site.options=["foo"]'], ['must be options, which begin with "-": foo']),
        ([*SLURM, GPUS, "site.time=٤:00:00"], ["site.time", "must be hours:minutes:seconds"]),
        ([*SLURM, GPUS, f"site.time={'9' * 20}-1:00:00"], ["site.time", "of at most 99999 days"]),
        ([*SLURM, GPUS, "site.memory=0G"], ["site.memory", "must be a whole number"]),
        *(
            ([*SLURM, GPUS, f"site.before={lines}"], ["site.before (command line): bash does not take these", said])
            for lines, said in (
                ('["true", "if true; then"]', "syntax error: unexpected end of file"),
                ('["cat <<E"]', "here-document at line 1"),
                ("['echo \\']", "unexpected end of file"),
            )
        ),
        (["--to", "torchx", "--devices", "2", "site.image=x"], ["--to torchx needs a way to ask for devices"]),
        (
            [*SLURM, "site.devices=none", 'site.options=["-G 4"]'],
            ["site.devices (command line): ranks compute on CPUs"],
        ),
        (
            [*SLURM, "site.devices=--gres=gpu:{n}", 'site.options=["--gres=nvme:1"]'],
            ["(command line: --gres=nvme:1): the script sets --gres, by site.devices"],
        ),
        ([*SLURM, GPUS, 'site.options=["-M other"]'], ["-M other): export SLURM_CLUSTERS instead"]),
        ([*PBS, 'site.options=["-v HF_HOME=/x"]'], ["-v HF_HOME=/x): a job that goes on would not have"]),
        ([*SLURM, GPUS, "site.memory=64000"], ["site.memory", "must be a whole number and K, M, G or T"]),
        ([*PBS, "site.memory=0"], ["site.memory (command line): only SLURM gives all of a node for 0"]),
        *(
            ([*SLURM, GPUS, f'site.options=["{option}"]'], [f"(command line: {option}): the script sets {said}"])
            for option, said in (
                ("--time=1:00", "--time, by site.time; give site.time instead"),
                ("-t 1:00", "-t, by site.time"),
                ("--output=x", "--output, by the log"),
                ("--chdir /x", "--chdir, by"),
                ("--no-requeue", "--no-requeue, by site.requeues"),
                ("--mem=5G", "--mem, by site.memory"),
                ("-p gpu", "-p, by site.partition; give site.partition instead"),
                ("--exclusive -J x", "-J, by the name"),
            )
        ),
        *(
            ([*PBS, f'site.options=["{option}"]'], [f"(command line: {option}): the script sets {said}"])
            for option, said in (
                ("-l select=1:ncpus=4", "-l select, by --nodes and --devices of codescent launch; leave it out"),
                ("-l filesystems=home,walltime=1:00:00", "-l walltime, by site.time; give site.time instead"),
                ("-lncpus=4", "-l ncpus, by site.cores"),
                ("-q prod", "-q, by site.partition"),
                ("-r n", "-r, by site"),
            )
        ),
        (
            [*SLURM, GPUS, "--times", "2", 'site.options=["--dependency=afterok:1"]'],
            ["the script sets --dependency, by --times; leave it out"],
        ),
        ([*SLURM, GPUS, "--", "--lr", "1"], ["-- --lr 1: such words are for a script of yours"]),
        ([*SLURM, GPUS, "run.name=a\udce9"], ["is not UTF-8 text"]),
        ([*SLURM, GPUS, "--out", "a\udce9.sh"], [r"'a\udce9.sh': is not UTF-8 text"]),
        ([*SLURM, GPUS, "--out", "nodir/x.sh", "site.cores=0"], ["--out nodir/x.sh: there is no folder", "site.cores"]),
        ([*SLURM, GPUS, "--out", "x" * 300], [f'--out "{"x" * 76}...: File name too long; give another name']),
        ([*SLURM, GPUS, "--out", "train.py/x.sh"], ['--out "train.py/x.sh": Not a directory']),
        ([*SLURM, GPUS, "--out", "train.py"], ["--out train.py: is there already"]),
        (["--to", "slrm"], ["--to slrm: unknown target; did you mean slurm?"]),
        (["--to", "slrm", "site.tme=3", "model.dim=1"], ["unknown target", "did you mean site.time?", "model.dim"]),
        (["--to", "lsf"], ["the targets are local, ssh, torchrun"]),
        ([], ["give --to TARGET: local, ssh"]),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    words: list[str], said: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["launch", *CONFIG, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for text in said:
        assert text in err, err
    assert "Traceback" not in err
    assert sorted(one.name for one in tmp_path.iterdir()) == ["corpus.txt", "train.py"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[model]\nx = 1\n[train]\n",
            "site.toml: has [model], [train], and no section [site]; give the file of a site",
        ),
        ("time = 04:00:00\n", 'site.toml:1: site.time: given 04:00:00; must be a string or "auto"; write "04:00:00"'),
    ],
)
def test_a_site_file_that_is_another(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("site.toml").write_text(text)
    assert cli.run(["launch", *CONFIG, *SLURM[:-1], GPUS, "--site", "site.toml"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a..b", "x" * 64])
def test_what_is_no_name_of_a_host_has_no_address(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert address.main([name]) == 2
    assert capsys.readouterr().err == f"error: {name}: this is no name of a host: its parts have 1 to 63 characters\n"


@pytest.mark.parametrize("folder", ["new\ntouch pwned\nline", "bad\udcff"])
@pytest.mark.parametrize("verb", [["launch", *CONFIG], ["doctor", "gpt2_124m"]])
def test_a_folder_that_is_no_line_of_a_script(
    folder: str, verb: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    (tmp_path / folder / "corpus.txt").write_text("a text " * 1000)
    assert cli.run([*verb, *SLURM, GPUS]) == 2
    (problem,) = capsys.readouterr().err.splitlines()
    assert problem.endswith("the name of this folder has characters that a script cannot have; call it elsewhere")


@pytest.mark.parametrize("target", ["slurm", "torchx"])
def test_a_config_or_script_whose_name_is_no_text(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = (Path(__file__).resolve().parent.parent / "configs" / "gpt2_124m.toml").read_text()
    for name, text in (("bad\udcff.py", ""), ("bad\udcff.toml", config)):
        (tmp_path / name).write_text(text)
        words = [name, "--to", target, *SLURM[2:], GPUS, "site.image=x"]
        assert cli.run(["launch", *words]) == 2
        out, err = capsys.readouterr()
        assert (out, "Traceback" in err) == ("", False)
        assert f"{name!r}: is not UTF-8 text, which a script is" in err


def test_a_command_that_is_not_there_is_said_with_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.run(["launch", *CONFIG, *SLURM, GPUS, "--submit", "site.cores=0"]) == 2
    err = capsys.readouterr().err
    assert "--submit: there is no sbatch here" in err
    assert "site.cores" in err


def test_numbers_have_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.run(["launch", *CONFIG, "--to", "local", "--devices", "9" * 5000])
    err = capsys.readouterr().err
    assert "... is not a whole number of at least 1 of at most 18 digits" in err
    assert "9" * 100 not in err


def test_a_limit_has_to_be_longer_than_the_saves_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    run = RunFolder.create("runs/gpt2_124m", "", {})
    run.event("checkpoint", step=1, path="x", seconds=600.0, best=False)
    assert cli.run(["launch", *CONFIG, *SLURM, GPUS, "site.time=00:20:00"]) == 2
    assert "the run saves 1230 s before it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ('site.before=["export HF_TOKEN=geheim"]', "the value of HF_TOKEN"),
        ('site.before=["export A=1", "export WANDB_API_KEY=\\"geheim\\""]', "the value of WANDB_API_KEY"),
        ('site.options=["--export=ALL,my_password=geheim"]', "the value of my_password"),
        ('site.launcher=["--token", "geheim"]', "the value of token"),
        ('site.container=["podman", "run", "-e", "SECRET=geheim"]', "the value of SECRET"),
        *(
            (f"site.before={json.dumps([line])}", what)
            for line, what in (
                ("export PGPASSWORD=12345678", "the value of PGPASSWORD"),
                ("HF_TOKEN+=geheim", "the value of HF_TOKEN"),
                ("USE_TOKEN=true MY_TOKEN_2=geheim", "the value of MY_TOKEN_2"),
                ("curl --header 'X-Api-Key: geheim' host", "the value of X-Api-Key"),
                ("curl -H 'Authorization: Bearer geheim' host", "the value of a header"),
                ("pip install --index https://me:geheim@host/", "a password in an address"),
                ("export URL=redis://:geheim@host", "a password in an address"),
                ("export HF_TOKEN=${HF_TOKEN:-geheim}", "the value of HF_TOKEN"),
                ("MYSQL_PWD=geheim mysqldump x", "the value of MYSQL_PWD"),
                ("export DB_PASS=geheim SSHPASS=$X", "the value of DB_PASS"),
                ("curl -sS -u me:geheim https://host/x", "a password of curl"),
                ("curl --user 'me:geheim' https://host/x", "a password of curl"),
                ("sshpass -p geheim ssh host", "a password of sshpass"),
                ("podman login -u me -p geheim registry.lab", "a password of a registry"),
                ("login hf_geheimgeheimgeheimgeheim", "a token of Hugging Face"),
                (f"git clone ghp_{'geheim' * 6}", "a token of GitHub"),
                (f"x github_pat_{'geheim_' * 4}", "a token of GitHub"),
                (f"x glpat-{'geheim' * 4}", "a token of GitLab"),
                (f"x sk-proj-{'geheim' * 4}", "a key of OpenAI or Anthropic"),
                (f"x AKIA{'GEHEIM12' * 2}", "a key of AWS"),
                (f"x AIza{'geheim' * 6}", "a key of Google"),
                ("notify xoxb-1234-geheim", "a token of Slack"),
                (f"x npm_{'geheim' * 6}", "a token of npm"),
                (f"wandb login --relogin {'0123456789' * 4}", "a key of wandb"),
                ("x eyJgeheimgeheim.eyJgeheimgeheim", "a web token (JWT)"),
            )
        ),
    ],
)
def test_a_secret_in_a_site_is_named_and_not_shown(word: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each known form, and names. The script has it as the user wrote it."""
    assert cli.run(["launch", *CONFIG, *SLURM, GPUS, word]) == 0
    out, err = capsys.readouterr()
    (line,) = [line for line in err.splitlines() if "secret" in line]
    key = word.partition("=")[0]
    assert line.startswith(f"warning: command line: {key}: {what} looks like a secret, and scripts and site files are")
    assert "geheim" not in err.lower()
    assert "geheim" in out.lower() or "12345678" in out


def test_a_message_about_a_value_does_not_show_a_secret(capsys: pytest.CaptureFixture[str]) -> None:
    token = f"hf_{'geheim' * 4}"
    words = (f"site.mpi={token}", f"train.precision={token}", "site.token=geheim", 'site.options=["A_TOKEN=geheim"]')
    for word in words:
        assert cli.run(["launch", *CONFIG, *SLURM, GPUS, word]) == 2
        assert "geheim" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--", "--api-key=geheim"], "the value of api-key"),
        (["--", "--lr", "1", "--hf-token", "geheim"], "the value of hf-token"),
        (["wandb.api_key=geheim"], "the value of api_key"),
        (["--", "https://me:geheim@host"], "a password in an address"),
        (["--", "--max-token", "512", "--token-file", "x", "--lr", "3e-4"], ""),
        (["--", "--pad-token", "<pad>", "--eos_token=</s>", "--mask-token", "[MASK]", "--special_token=x"], ""),
        (["--", "--first_pass=train", "--num-pass", "two", "--token", "<none>"], ""),
    ],
)
def test_a_secret_in_the_words_of_an_own_script(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("own.py").write_text("print()")
    assert cli.run(["launch", "own.py", "--to", "local", "--devices", "1", *words]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "secret" in line]
    assert bool(lines) == bool(what)
    assert all(line.startswith(f"warning: the words for own.py: {what} looks like") for line in lines)
    assert "geheim" not in "".join(lines)


@pytest.mark.parametrize(
    "word",
    [
        'site.before=["export HF_TOKEN=$(cat ~/.hf)"]', 'site.before=["export HF_TOKEN=\\"$MY_TOKEN\\""]',
        'site.before=["export HF_TOKEN_PATH=/home/me/token", "unset HF_TOKEN && true"]',
        'site.before=["export TOKENIZERS_PARALLELISM=false"]', 'site.launcher=["--export=HF_TOKEN,PATH"]',
        'site.before=["git clone https://$USER:$PASSWORD@host/x"]', "site.account=token",
        'site.before=["foo --use-token", "module list"]', 'site.options=["--licenses=gpus=1", "--comment=ngpus=2"]',
        'site.options=["--comment \\"-J x\\"", "--gres=lustre_gpu_fs:1"]',
        *(
            f"site.before={json.dumps([line])}"
            for line in (
                "export HF_TOKEN=${MY_TOKEN} B_TOKEN=${MY_TOKEN:?is not set} C_TOKEN=${MY_TOKEN:-$OTHER}",
                'export HF_TOKEN="$(< ~/token)" B_TOKEN=`cat ~/token` C_TOKEN="$(printf %s "$MY_TOKEN")"',
                "export USE_TOKEN=true MAX_TOKEN=131072 OLDPWD=/x MY_PWD=/x BYPASS=yes",
                "export GOOGLE_APPLICATION_CREDENTIALS=/home/me/key.json",
                "curl -u $USER:$PASSWORD -H 'Authorization: Bearer $MY_TOKEN' https://me@host/x",
                "git clone https://$MY_TOKEN@github.com/x/y && git clone ssh://git@github.com/x/y",
                "podman run --user 1000:1000 --first-pass 2 --use-token --verbose",
                "curl -O https://host/x; docker run -u 1000:1000 image",
                "export HF_HOME=/data/hf_datasets_and_models_cache HF_TOKEN=`cat ~/token`",
                "source /envs/sk-learn-gpu-py311-cuda12/bin/activate",
                "export GOOGLE_APPLICATION_CREDENTIALS=secrets/key.json C_TOKEN=`printf %s $X`",
                'export HF_TOKEN=${HF_TOKEN:-"$(cat ~/token)"}',
                "shopt -s extglob; ls !(a)",
                "sshpass -p $PW ssh host; sshpass -e ssh -p 2222 host; curl -u me host",
                "podman login -u me -p '$PW' host; docker run -p 8080:80 image; curl -u ':' --negotiate host",
                "export HF_TOKEN=${HF_TOKEN:-} MYSQL_PWD=$PW BYPASS=slow; curl -s host | docker run -u 1000:1000 x",
                "wandb login $WANDB_API_KEY && git checkout 0123456789012345678901234567890123456789",
            )
        ),
    ],
)  # fmt: skip
def test_names_of_variables_are_no_secrets(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["launch", *CONFIG, *SLURM, GPUS, word]) == 0
    assert "secret" not in capsys.readouterr().err
