"""In: the class that a tokenizer's folder names, and its model. Out: the class that `AutoTokenizer` makes.
Does not make a tokenizer (rebuilt.py does). The names are those of transformers 5.23, `tokenization_auto.py`."""

from __future__ import annotations

from typing import Any

_MODELS = {
    "Albert": "albert yoso",
    "Bert":
        "align bark bert blip bros chinese_clip convbert distilbert electra ernie flava git grounding-dino layoutlm "
        "lxmert megatron-bert mm-grounding-dino mobilebert nomic_bert squeezebert tvp vilt visual_bert",
    "BigBird": "big_bird",
    "BioGpt": "biogpt",
    "Blenderbot": "blenderbot",
    "BlenderbotSmall": "blenderbot-small",
    "Camembert": "camembert",
    "Canine": "canine",
    "CLIP": "aimv2 clip clipseg groupvit omdet-turbo oneformer owlv2 owlvit sam3 sam3_video xclip",
    "Clvp": "clvp",
    "Cohere": "aya_vision cohere cohere2",
    "CpmAnt": "cpmant",
    "CTRL": "ctrl",
    "Deberta": "deberta",
    "DebertaV2": "deberta-v2",
    "Dia": "dia",
    "DPRQuestionEncoder": "dpr",
    "Esm": "esm",
    "Esmc": "esmc esmfold2",
    "Flaubert": "flaubert",
    "FSMT": "fsmt",
    "Funnel": "funnel",
    "Gemma":
        "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 t5gemma "
        "zaya",
    "GPT2":
        "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo jais2 opt "
        "phi starcoder2",
    "GPTNeoX": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "GPTNeoXJapanese": "gpt_neox_japanese",
    "GPTSw3": "gpt-sw3",
    "Lasr": "lasr_ctc lasr_encoder",
    "LayoutLMv2": "layoutlmv2",
    "LayoutLMv3": "layoutlmv3",
    "LayoutXLM": "layoutxlm",
    "Llama": "idefics idefics2",
    "Luke": "luke",
    "MarkupLM": "markuplm",
    "MBart": "mbart",
    "Mgpstr": "mgp-str",
    "MPNet": "mpnet",
    "Nllb": "nllb-moe",
    "Nougat": "pp_formulanet",
    "OpenAIGPT": "openai-gpt",
    "Pegasus": "pegasus",
    "Perceiver": "perceiver",
    "PLBart": "plbart",
    "ProphetNet": "prophetnet",
    "Qwen2":
        "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr "
        "moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 "
        "qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice",
    "Qwen3_5": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "Rag": "rag",
    "Reformer": "reformer",
    "RemBert": "rembert",
    "Roberta":
        "bart bridgetower clap data2vec-text florence2 ibert led lilt longformer mra mvp roberta "
        "roberta-prelayernorm",
    "RoCBert": "roc_bert",
    "RoFormer": "roformer",
    "SeamlessM4T": "seamless_m4t seamless_m4t_v2",
    "Siglip2": "siglip2",
    "Splinter": "splinter",
    "T5": "mt5 musicgen musicgen_melody switch_transformers t5",
    "Tapas": "tapas",
    "Udop": "udop",
    "VideoPrism": "videoprism",
    "Vits": "vits",
    "Wav2Vec2CTC": "data2vec-audio hubert unispeech unispeech-sat wav2vec2 wav2vec2-bert wav2vec2-conformer",
    "Whisper": "whisper",
    "XGLM": "xglm",
    "XLM": "xlm",
    "XLMRoberta": "gte jina_embeddings_v3 metaclip_2 trocr xlm-roberta xmod",
    "XLNet": "xlnet",
}  # fmt: skip
"""By the stem of a class: the models (`model_type`) whose tokenizer it is where the folder names none."""
_OF_FILES = (
    "EvollaModel arctic aria beam bigbird_pegasus camembertv2-base canary chatlm cohere_asr ernie4_5 ernie4_5_moe "
    "flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode "
    "gradium_phonon_tts granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm "
    "internlm2 internlm3 iquestcoder jamba kimi_k25 kimi_linear kosmos-2 llava llava_next mimo_v2_flash minicpm3 "
    "minicpm_ocr minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3 mistral mistral3 mistral_large4 "
    "mixtral modernbert modernbert-decoder molmo molmo2 nemo_speechlm nemotron nvfp4 nystromformer olmo2 olmo3 "
    "olmo_hybrid opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe pix2struct pixtral pocket_tts "
    "smolvlm stablelm step3_vl umt5 vipllava voxtral voxtral_realtime xlm-roberta-xl"
)
"""Models whose tokenizer is read from its file, whatever class the folder names."""
_DECIDE = "hyperclovax_vision_v2 qwen2 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen4_exp siglip2"
"""Models that decide the class, whatever class the folder names."""
OF_MODEL = {
    **{model: f"{stem}Tokenizer" for stem, models in _MODELS.items() for model in models.split()},
    **dict.fromkeys(_OF_FILES.split(), ""),
}
DECIDING = frozenset((*_OF_FILES.split(), *_DECIDE.split()))
NOT_MADE = frozenset((
    "Albert", "Barthez", "Bartpho", "Bert", "BertGeneration", "BertJapanese", "Bertweet", "BigBird", "BioGpt",
    "Blenderbot", "BlenderbotSmall", "ByT5", "Camembert", "Canine", "CLIP", "Clvp", "CodeLlama", "ConvBert",
    "Cpm", "CpmAnt", "CTRL", "Deberta", "DebertaV2", "Dia", "DistilBert", "DPRContextEncoder",
    "DPRQuestionEncoder", "Esm", "Esmc", "FastSpeech2Conformer", "Flaubert", "FSMT", "Funnel",
    "GPTNeoXJapanese", "GPTSw3", "Herbert", "Lasr", "LayoutLMv2", "LayoutLMv3", "LayoutXLM", "Lxmert", "M2M100",
    "Marian", "MarkupLM", "MBart", "MBart50", "Mgpstr", "MLuke", "MobileBert", "MPNet", "MyT5", "Nllb",
    "Nougat", "OpenAIGPT", "Pegasus", "Perceiver", "Phobert", "PLBart", "Pop2Piano", "ProphetNet", "Qwen3_5",
    "Rag", "Reformer", "RemBert", "RoCBert", "RoFormer", "SeamlessM4T", "Siglip", "Siglip2", "Speech2Text",
    "SpeechT5", "Splinter", "Tapas", "Tipsv2", "Udop", "VideoPrism", "Vits", "Wav2Vec2CTC",
    "Wav2Vec2PhonemeCTC", "Whisper", "XGLM", "XLM", "XLNet",
))  # fmt: skip
"""Stems of the classes of transformers 5 that do not read tokenizer.json as it is, and that are not made here."""


def class_of_model(named: str, model_type: Any) -> str:
    """The class that `AutoTokenizer` makes of a folder, without "Fast"; "": the tokenizer of the file.

    Args:
        named: the class that the folder names, without "Fast"; "": none.
        model_type: of config.json.
    """
    if not isinstance(model_type, str) or (named and model_type not in DECIDING):
        return named
    return OF_MODEL.get(model_type, "")
