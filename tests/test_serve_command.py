"""In: trained runs. Out: `codescent serve` and `codescent chat` as users start them.
Does not test the answers (test_serving.py does)."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import called, environment, make_project, start, train
from served import TALK

from codescent.base.visible import visible

pytestmark = pytest.mark.slow

FEW = ("train.num_steps=2", "train.eval_every=0", "data.seq_len=64", "model.seq_len=64")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a text, and one of conversations with a chat template."""
    folder = tmp_path_factory.mktemp("project")
    make_project(folder)
    train(folder, "text", *FEW)
    (folder / "talk.jinja").write_text(TALK)
    talks = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}] for n in range(40)]
    (folder / "talks.jsonl").write_text("".join(json.dumps({"messages": one}) + "\n" for one in talks))
    train(folder, "chat", *FEW, "data.task=sft", "data.corpus=talks.jsonl", "data.chat_template=talk.jinja")
    return folder


def asked(url: str, path: str, body: Any = None, token: str = "") -> Any:
    """The JSON of an answer."""
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(url + path, None if body is None else json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


@contextmanager
def serving(project: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """`codescent serve`, the URL that it prints, and its line; killed at the end if it still runs."""
    process = start(project, "serve", *words, "--port", "0")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "http://" in line, line + (process.stderr.read() if process.stderr else "")
        yield process, line.rpartition(" at ")[2].strip(), line
    finally:
        process.kill()
        process.communicate()


def test_a_run_is_served_until_a_signal_comes(project: Path) -> None:
    """Fault: the process serves another model, listens beyond loopback, or does not end with 0 on SIGTERM."""
    with serving(project, "runs/chat") as (process, url, line):
        assert line.startswith("chat, step 2: completions, chat at http://127.0.0.1:")
        body = {"model": "chat", "messages": [{"role": "user", "content": "q1"}], "max_tokens": 4, "temperature": 0}
        said = asked(url, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, ""), out + err
    talked = subprocess.run(
        [sys.executable, "-m", "codescent", "chat", "runs/chat", "--temperature", "0", "--tokens", "4"],
        cwd=project, env=environment(), input="q1\n", text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert talked.returncode == 0
    assert talked.stdout == f"{visible(said)}\n"


def test_sigterm_lets_a_stream_end(project: Path) -> None:
    """Fault: SIGTERM cuts an answer that is being sent."""
    with serving(project, "runs/text") as (process, url, _):
        body = {"model": "text", "prompt": "many", "max_tokens": 50, "n": 8, "stream": True, "temperature": 0}
        data = json.dumps({**body, "stream_options": {"include_usage": True}, "logprobs": 0}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = [answer.readline()]
            process.send_signal(signal.SIGTERM)
            lines += answer.readlines()
        process.communicate(timeout=60)
        assert process.returncode == 0
    events = [line.removeprefix(b"data: ").strip() for line in lines if line.strip()]
    assert events[-1] == b"[DONE]"
    assert json.loads(events[-2])["usage"]["completion_tokens"] == 8 * 50


def test_beyond_loopback_a_token_is_needed_that_others_cannot_read(project: Path, tmp_path: Path) -> None:
    """Fault: the model is open to the network, the token is in a file that others may read, or is printed."""
    token = tmp_path / "token"
    with serving(project, "runs/text", "--host", "0.0.0.0", "--token-file", str(token)) as (_, url, line):
        assert token.stat().st_mode & 0o777 == 0o600
        secret = token.read_text().strip()
        assert secret not in line
        assert len(secret) == 64
        url = url.replace("0.0.0.0", "127.0.0.1")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            asked(url, "/v1/models")
        assert asked(url, "/v1/models", token=secret)["data"][0]["id"] == "text"
    token.chmod(0o644)
    done = called(project, "serve", "runs/text", "--port", "0", "--token-file", str(token))
    assert (done.returncode, done.stdout) == (2, "")
    said = f"error: {token}: other users may read this secret: chmod 600 {token}, or name another file: --token-file"
    assert done.stderr == f"{said} FILE\n"


def test_requests_are_logged_only_where_a_user_asks_for_it(project: Path, tmp_path: Path) -> None:
    """Fault: texts of users are kept unasked, or in a file that others may read; a line lacks what the report reads."""
    log = tmp_path / "requests.jsonl"
    before = set(project.rglob("*"))
    for words in ((), ("--log", str(log))):
        with serving(project, "runs/text", *words) as (process, url, _):
            asked(
                url, "/v1/completions", {"model": "text", "prompt": ["many workers", "one"], "max_tokens": 3, "seed": 1}
            )
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    assert set(project.rglob("*")) == before
    assert log.stat().st_mode & 0o777 == 0o600
    (line,) = map(json.loads, log.read_text().splitlines())
    assert line["request"]["prompt"] == ["many workers", "one"]
    assert (line["prompt_tokens"], line["tokens"], line["finish"]) == ([12, 3], [3, 3], ["length", "length"])
    assert len(line["texts"]) == len(line["prompt_losses"]) == 2
    assert all(0 < loss < 10 for loss in line["prompt_losses"])
    log.chmod(0o644)
    done = called(project, "serve", "runs/text", "--port", "0", "--log", str(log))
    assert (done.returncode, done.stderr) == (
        2, f"error: --log {log}: other users may read it, and it would hold requests: chmod 600 {log}\n",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve", "runs/absent"), "runs/absent: no such run folder"),
        (("chat", "runs/absent"), "runs/absent: no such run folder"),
        (("serve", "runs/bare"), "runs/bare/tokenizer.json: the run folder has no tokenizer"),
        (("chat", "runs/bare"), "runs/bare/tokenizer.json: the run folder has no tokenizer"),
        (("serve", "runs/text", "--step", "7"), "step 7"),
        (("serve", "runs/text", "--host", "192.0.2.1"), "--host 192.0.2.1: Cannot assign requested address"),
        (("serve", "runs/text", "--host", "no.such.host.invalid"), "--host no.such.host.invalid: "),
        (("serve", "runs/text", "--rows", "99999999999"), "--rows 99999999999: at most 4,096; more requests may wait"),
        (("serve", "runs/text", "--port", "70000"), "'70000' is no port: at most 65535"),
        (("serve", "runs/text", "--log", "absent/log"), "--log absent/log: "),
        (("serve", "runs/absent", "--log", "new.log"), "runs/absent: no such run folder"),
        (("serve", "runs/text", "--host", ".."), "--host ..: is no name of a host; give an address of this machine"),
        (("serve", "runs/text", "--token-file", "two"), "two: a token of clients is one word; name another file"),
        (("serve", "runs/text", "--token-file", "pipe"), "pipe: the token of clients cannot be stored there"),
        (("chat", "runs/text", "--system", "x"), "--system: text has no chat template, which would write it"),
        (("chat", "runs/chat", "--system", "\udcff"), "--system: the text holds half of a surrogate pair"),
        (("chat", "runs/text", "--top-p", "2"), "--top-p 2.0: must be in (0, 1]"),
        (("chat", "runs/nochat"), "runs/nochat/chat.json: missing"),
    ],
)
def test_what_cannot_be_served_is_refused_in_a_line(project: Path, words: tuple[str, ...], said: str) -> None:
    """Fault: a traceback, a process that listens without a model, or half a start."""
    if not (project / "two").exists():
        (project / "two").write_text("two words\n")
        (project / "two").chmod(0o600)
        os.mkfifo(project / "pipe", 0o600)
    for name, left_out in (("bare", "tokenizer.json"), ("nochat", "chat.json")):
        if not (project / "runs" / name).exists():
            source = project / "runs" / ("text" if name == "bare" else "chat")
            subprocess.run(["cp", "-r", source, project / "runs" / name], check=True)
            (project / "runs" / name / left_out).unlink()
    done = called(project, *words, *(("--port", "0") if words[0] == "serve" and "--port" not in words else ()))
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == 1 or "usage" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "new.log").exists()


def test_a_port_in_use_is_said_before_the_model_is_read(project: Path) -> None:
    """Fault: a traceback of the library, after a minute of loading."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = called(project, "serve", "runs/absent", "--port", str(port))
    assert (done.returncode, done.stderr) == (
        2,
        f"error: --port {port}: cannot listen at 127.0.0.1: Address already in use; give another --port; 0 takes a "
        "free one\n",
    )


def talk(project: Path, run: str, *lines: str, words: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`codescent chat` with these lines as its input."""
    program = [sys.executable, "-m", "codescent", "chat", f"runs/{run}", "--tokens", "4", "--temperature", "0", *words]
    return subprocess.run(
        program, cwd=project, env=environment(), input="".join(f"{line}\n" for line in lines), text=True,
        capture_output=True, check=False, timeout=120,
    )  # fmt: skip


def test_a_chat_has_a_history_that_can_be_saved_and_forgotten(project: Path, tmp_path: Path) -> None:
    """Fault: a message is answered without those before it, /reset keeps some, /save writes what sft cannot read."""
    file = tmp_path / "talk.jsonl"
    saves = [
        f"/save {file}",
        f"/save {file}",
        "/reset",
        "q1",
        f"/save {file}2",
        "/nonsense",
        "//x",
        "/help",
        "/exit",
        "q9",
    ]
    done = talk(project, "chat", "q1", "go\\", "on", *saves, words=("--system", "be"))
    assert done.returncode == 0, done.stderr
    (saved,) = map(json.loads, file.read_text().splitlines())
    messages = saved["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [messages[0]["content"], messages[1]["content"], messages[3]["content"]] == ["be", "q1", "go\non"]
    assert f"/save {file}: is there already; give another name" in done.stderr
    (again,) = map(json.loads, Path(f"{file}2").read_text().splitlines())
    assert again["messages"][:2] == messages[:2]
    assert len(again["messages"]) == 3
    assert "/nonsense: no such command; /help lists them" in done.stderr
    assert "/reset   forget the conversation" in done.stdout
    assert "q9" not in done.stdout


def test_a_model_without_a_template_goes_on_with_the_text(project: Path, tmp_path: Path) -> None:
    """Fault: a base model cannot be talked with, or forgets what it said; a long text ends the session."""
    file = tmp_path / "talk.txt"
    done = talk(project, "text", "many workers ", "one ", f"/save {file}", "/system x", "y" * 100, "/exit")
    assert done.returncode == 0, done.stderr
    text = file.read_text()
    assert text.startswith("many workers ")
    assert "one " in text[13:]
    assert "/system: the model has no chat template, which would write it" in done.stderr
    assert "without a chat template: it continues the text that you begin" in done.stderr
    assert len(done.stdout.splitlines()) >= 3


def test_lines_that_cannot_be_read_leave_the_session_as_it_is(project: Path) -> None:
    """Fault: bytes that are no UTF-8 take other lines with them, or a name of a file ends the session."""
    lines = b"many\n\xff\xfe\n/save a\0b\n/save runs\nworkers\n/system \xff\n"
    program = [sys.executable, "-m", "codescent", "chat", "runs/chat", "--tokens", "2", "--temperature", "0"]
    done = subprocess.run(program, cwd=project, env=environment(), input=lines, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.decode().splitlines()[1:] if not line.startswith("(ended by")]
    assert said[0].endswith("or bytes that are not UTF-8")
    assert said[1] == r"/save a\x00b: is no name of a file"
    assert said[2] == "/save runs: is there already; give another name"
    assert said[3].startswith("/system: the text holds half of")
    assert len(said) == 4
    endless = subprocess.run(
        program, cwd=project, env=environment(), input=b"a" * (1 << 23), capture_output=True, check=False
    )
    assert (endless.returncode, endless.stdout) == (2, b"")
    assert b"error: the input: a line has 8,388,608 characters or more" in endless.stderr


def test_ctrl_c_at_the_prompt_leaves_the_session(project: Path) -> None:
    """Fault: a Ctrl-C that comes after the end of an answer ends the session, and the conversation is lost."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "codescent", "chat", "runs/chat", "--tokens", "2"],
        cwd=project, env=environment(), stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # this process may ignore it
    )  # fmt: skip
    os.close(follower)
    shown = b""

    def until(words: bytes, *, by_signals: bool = False) -> None:
        nonlocal shown
        while words not in shown:
            if select.select([leader], [], [], 0.2)[0]:
                shown += os.read(leader, 1000)
            elif by_signals:  # readline does not see one that comes just before it waits
                os.kill(process.pid, signal.SIGINT)
        shown = shown.partition(words)[2]

    try:
        until(b"> ")
        until(b"(/exit or Ctrl-D ends)", by_signals=True)
        until(b"> ")
        os.write(leader, b"/help\n")
        until(b"/save")
        until(b"> ")
        os.write(leader, b"/exit\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def test_a_server_that_nobody_listens_to_ends_by_a_signal(project: Path) -> None:
    """Fault: where the standard error is closed, a message about SIGTERM ends the handler, and the server goes on."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "codescent", "serve", "runs/text", "--port", "0"],
        cwd=project, env=environment(), stdout=subprocess.PIPE, stderr=writing, text=True,
    )  # fmt: skip
    os.close(writing)
    os.close(reading)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().rpartition(" at ")[2].strip()
        body = {"model": "text", "prompt": "m", "max_tokens": 60, "n": 8, "stream": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.readline()
            process.send_signal(signal.SIGTERM)
            assert answer.read().endswith(b"data: [DONE]\n\n")
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_old_messages_are_left_out_where_the_context_is_full(project: Path) -> None:
    """Fault: a long conversation ends in an error, or old messages are left out in silence."""
    done = talk(project, "chat", *(f"{n}{'q' * 12}" for n in range(4)), "q" * 70)
    assert done.returncode == 0, done.stderr
    assert "messages have no room in the context, and were not read)" in done.stderr
    assert "tokens, and the model reads 64, its answer included" in done.stderr


def test_ctrl_c_ends_an_answer_and_not_the_session(project: Path) -> None:
    """Fault: Ctrl-C during a long answer ends the command, and the conversation is lost."""
    process = start(project, "chat", "runs/text", "--tokens", "100000000", stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("many\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    os.kill(process.pid, signal.SIGINT)
    while "(interrupted)\n" not in (text := process.stdout.readline()):
        assert text
    out, err = process.communicate("/reset\n/help\n/exit\n", timeout=60)
    assert process.returncode == 0, err
    assert "/reset" in out


def test_embeddings_of_a_run_are_those_of_transformers(project: Path, data_dir: Path) -> None:
    """Fault: the head, the pooling or [CLS] and [SEP] differ from what users of BERT's embeddings compute."""
    transformers = pytest.importorskip("transformers")
    vocabulary = data_dir / "bert-base-uncased" / "vocab.txt"
    words = ("model.kind=bert", "model.vocab_size=auto", "data.task=mlm", f"data.tokenizer=bert:{vocabulary}")
    train(project, "bert", *FEW, *words)
    done = called(project, "export", "runs/bert", "bert")
    assert done.returncode == 0, done.stderr
    model = transformers.BertModel.from_pretrained(project / "bert", add_pooling_layer=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(project / "bert")
    texts = ["many workers", "one gradient descent step", "sum"]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    states_BTD = model(**batch).last_hidden_state.detach()
    mask_BT1 = batch["attention_mask"][..., None]
    means_BD = (states_BTD * mask_BT1).sum(1) / mask_BT1.sum(1)
    expected = torch.nn.functional.normalize(means_BD, dim=-1)
    with serving(project, "runs/bert") as (_, url, line):
        assert line.startswith("bert, step 2: embeddings at ")
        found = asked(url, "/v1/embeddings", {"model": "bert", "input": texts})["data"]
    for one, vector in zip(found, expected.tolist(), strict=True):
        assert one["embedding"] == pytest.approx(vector, abs=1e-5)
    refused = called(project, "serve", "runs/bert", "--port", "0", "--log", "log")
    assert refused.stderr == "error: --log: requests for embeddings are not logged; leave it out\n"
