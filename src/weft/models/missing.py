"""Architectures that weft does not run, and the mechanism that each one lacks here. Torch-free."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MODELS_PAGE = "docs/models.md lists what weft serves."
LIKENESS = 0.7  # of names without their endings, from 0 to 1
_ENDING = re.compile(r"(For[A-Z]\w*|LMHeadModel|Model)$")

_LATENT = "multi-head latent attention (MLA)"
_SPARSE = "sparse attention by an indexer"
_STATE = "its kind of recurrent layers (the delta rule, KDA, Mamba-2 and convolutions are known)"
_ENCODER = "this kind of encoder (BERT, RoBERTa, XLM-RoBERTa and ModernBERT are known)"
_READER = "what reads its config and names its tensors"
_OLDER = "biases of LayerNorm, and MLPs without a gate"
_VISION = "towers for images, sound or video, and no text part of this checkpoint is known"

# Patterns of whole names, of which the first one that fits counts.
_MISSING = {
    r"DeepseekVLV2ForCausalLM|LongcatFlash.*|SarvamMLA.*": f"its kind of {_LATENT}",
    r"DeepseekV32.*|GlmMoeDsa.*|Glm5Next.*|MiniMaxM3.*|MistralLarge4.*": _SPARSE,
    r"DeepseekV4.*|HYV4.*": f"{_SPARSE}, and hyper-connections",
    r"KimiK3.*": "experts of a latent space, their activation (SiTU) and residuals of attention",
    r"BailingMoeForCausalLM": "its routing of experts",
    r"Bailing.*": f"{_STATE}, and {_LATENT}",
    r"OlmoHybrid.*": _STATE,
    r"Nemotron_?H.*": _VISION,
    r"(Falcon)?Mamba2?ForCausalLM|Jamba.*|Bamba.*|Zamba.*|Zaya.*|RecurrentGemma.*|Rwkv.*": _STATE,
    r"MiniMaxForCausalLM|MiniMaxText01.*|xLSTM.*": _STATE,
    r"FalconH1.*": f"{_STATE}, in one layer with attention",
    r"Llama4.*": "attention in chunks of the sequence",
    r"Gemma3n.*": "alternating updates of several residuals (AltUp)",
    r"DeciLM.*": "layers without attention or of unlike MLPs",
    r"Dbrx.*|Grok.*|Arctic.*|PhiMoE.*|JetMoe.*|FlexOlmo.*|.*M[oO][eE].*ForCausalLM": (
        "its routing of experts"
    ),
    r"(GPT|Gpt|Opt|OPT|Bloom|Falcon|MPT|Mpt|CodeGen|Phi|Persimmon|StableLm|Starcoder2).*"
    r"|Nemotron.*": _OLDER,
    r"DiffLlama.*": "differential attention",
    r"Ouro.*": "layers that a token goes through several times",
    r"(LLaDA|Dream|RND1).*": "generation by diffusion",
    r"Bit[Nn]et.*": "ternary weights",
    r"(AXK|PLM).*": f"its kind of {_LATENT}",
    r"Qwen4.*|Dots3Note.*|Inkling.*": _SPARSE,
    r"Plamo2.*": _STATE,
    r"VaultGemma.*|NanoChat.*|Jais.*|Olmo.*|Plamo3.*|Solar.*|Orion.*|TeleChat.*": _READER,
    r"(BaiChuan|Baichuan|InternLM|ChatGLM|QWen|RW|Exaone|Xverse|Aquila|MiniCPM|MiMo|Step3).*": (
        _READER
    ),
    r"(Refact|CodeShell|Maincoder|SmallThinker|PanguEmbedded|IQuestCoder|Deepseek).*": _READER,
    r"(Bert|Roberta|XLMRoberta|ModernBert)For.*": "heads of encoders but cross encoders'",
    r".*(Bert|BERT|Roberta|Nomic|Electra|MPNet|Deberta).*|NewModel|Gte.*": _ENCODER,
    r"(T5|MT5|UMT5|Bart|MBart|Pegasus|Marian|M2M100|Whisper|T5Gemma).*": "encoder-decoder models",
    r".*ForSequenceClassification|.*ForTokenClassification|.*ForRewardModel": (
        "its head, which gives classes and no tokens"
    ),
    r".*ForConditionalGeneration|.*ForVision.*|.*VL.*|Llava.*|.*Omni.*": _VISION,
}


def missing_mechanism(architecture: str) -> str | None:
    """Return what weft lacks for an architecture that it does not run; None if nobody knows."""
    for pattern, mechanism in _MISSING.items():
        if re.fullmatch(pattern, architecture):
            return mechanism
    return None


def supported_instead(architecture: str, known: Iterable[str]) -> str:
    """A sentence with up to three known names that are most like this one, and where all are."""
    bare = {name: _ENDING.sub("", name).lower() for name in known}
    word = _ENDING.sub("", architecture).lower()
    near = difflib.get_close_matches(word, [*dict.fromkeys(bare.values())], n=3, cutoff=LIKENESS)
    named = [next(name for name in bare if bare[name] == one) for one in near]
    return f"The nearest supported: {', '.join(named)}. {MODELS_PAGE}" if named else MODELS_PAGE
