"""Reads ``quantization_config``: the storage format of a checkpoint's weights. Torch-free.

A key that may change the result and that is not read here is an error, as in the rest of the
config.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weft.kernels.storage import Storage, common_storage
from weft.models.config_reader import ConfigReader

METHODS = ("awq", "compressed-tensors", "fp8", "gptq", "modelopt", "mxfp4")
GGUF = "gguf"  # the method of GGUF files, whose tensors have types of their own
FP8_METHODS = ("float-quantized", "fp8")
MX_METHODS = ("mxfp4", "mxfp4-pack-quantized")
GROUPS = (32, 64, 128)
NVFP4 = (
    "NVFP4 needs the FP4 tensor cores of Blackwell GPUs (compute capability 10.0 and 12.0), for "
    "which weft has no kernels; take the model's checkpoint in FP8, AWQ, GPTQ or MXFP4, or in "
    "bfloat16 with quantize"
)

# Keys that steer how a checkpoint was made, or kernels of other engines.
_AWQ_IGNORED = """
backend checkpoint_format desc_act do_fuse exllama_config fuse_max_seq_len lm_head meta
modules_to_fuse modules_to_not_convert pack_dtype sym
"""
_GPTQ_IGNORED = """
backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment damp_percent
dataset desc_act disable_exllama exllama_config lm_head max_input_length mse meta
model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block
modules_in_block_to_quantize offload_to_disk pad_token_id quant_method static_groups tokenizer
true_sequential use_cuda_fp16 use_exllama v2
"""
_FP8_IGNORED = "dequantize ignored_layers kv_cache_scheme modules_to_not_convert"
_MODELOPT_IGNORED = (
    "config_groups exclude_modules ignore kv_cache_quant_algo kv_cache_scheme producer"
)
# KV is rounded with scales of its own, token by token: stored scales are read by nobody.
_COMPRESSED_IGNORED = "global_compression_ratio ignore kv_cache_scheme quantization_status version"


@dataclass(frozen=True)
class StoredWeights:
    """The storage of quantised weights in a checkpoint.

    Which of its weights are quantised, the names of its tensors tell.
    """

    method: str  # awq, gptq, or a format of compressed-tensors
    bits: int
    group: int | None  # inputs that share a scale; None: all of a row
    zeros: bool  # zero points are stored; else they are 2 ** (bits - 1)
    zero_offset: int = 0  # what is added to a stored zero point
    one_scale: bool = False  # of FP8: one for all of a weight
    inputs: str = "token"  # of FP8: how activations are rounded, see ``Storage``
    block_rows: int = 0  # of FP8 with a scale for ``group`` inputs of so many outputs
    kinds: str = ""  # of GGUF: the types of its tensors
    tensors: tuple[tuple[str, Storage], ...] = ()  # of GGUF: those with codes

    @property
    def is_float(self) -> bool:
        """Whether the weights are FP8 or MXFP4, and not integers."""
        return self.method in (*FP8_METHODS, *MX_METHODS)

    @property
    def may_be_rounded(self) -> bool:
        """Whether ``quantize`` applies to the numbers that the codes stand for."""
        return self.is_float or self.method == GGUF

    def common(self, names: Iterable[str]) -> Storage | None:
        """Return how tensors of a GGUF file are kept together; None: one of them is of floats.

        Args:
            names: without what stands before ``layers.``.
        """
        known = {name.removeprefix("model."): storage for name, storage in self.tensors}
        found = [known.get(name) for name in names]
        coded = [storage for storage in found if storage is not None]
        return common_storage(coded) if len(coded) == len(found) else None

    def storage(self, inputs: int) -> Storage:
        """Return how kernels hold a weight of so many inputs as it is stored."""
        group = None if self.group is None or self.group >= inputs else self.group
        if self.method in MX_METHODS:
            return Storage(4, self.group, "e8m0", format="e2m1", inputs="float")
        if self.is_float:
            return Storage(8, self.group, "float32", format="e4m3", inputs=self.inputs)
        scales = "float16" if self.method in ("awq", "gptq") else "bfloat16"
        return Storage(self.bits, group, scales, self.zeros)

    def __str__(self) -> str:
        if self.method == GGUF:
            return f"GGUF's {self.kinds}"
        if self.method in MX_METHODS:
            return f"{self.method}, blocks of {self.group}"
        name = "" if self.method == "fp8" else f"{self.method} "
        if self.block_rows:
            return f"{name}fp8, blocks of {self.block_rows} x {self.group}"
        if self.is_float:
            return f"{name}fp8, a scale a {'weight' if self.one_scale else 'channel'}"
        grouped = "a scale a channel" if self.group is None else f"groups of {self.group}"
        return f"{self.method} int{self.bits}, {grouped}"


def read_stored_weights(config: ConfigReader) -> StoredWeights | None:
    """Read ``quantization_config``; None for a checkpoint whose weights are plain floats.

    Raises:
        UnsupportedModelError: a method, key or value that weft does not implement.
    """
    section = config.section("quantization_config")
    if section is None:
        return None
    method = section.choice("quant_method", "", METHODS)
    readers = {"awq": _awq, "gptq": _gptq, "fp8": _fp8, "compressed-tensors": _compressed}
    readers |= {"modelopt": _modelopt, "mxfp4": _mxfp4}
    reader = readers[method]
    stored = reader(section)
    section.finish()
    return stored


def _bits(config: ConfigReader, key: str, known: tuple[int, ...]) -> int:
    bits = config.positive(key)
    if bits not in known:
        config.refuse(key, bits, f"supported: {', '.join(map(str, known))}")
    return bits


def _group(config: ConfigReader) -> int | None:
    group = config.value("group_size", -1)
    if group == -1:
        return None
    if group not in GROUPS:
        config.refuse("group_size", group, f"supported: {', '.join(map(str, GROUPS))}, -1")
    return int(group)


def _awq(config: ConfigReader) -> StoredWeights:
    version = config.value("version", config.value("format", "gemm"))
    if str(version).lower() != "gemm":
        config.refuse("version", version, "supported: gemm")
    config.ignore(*_AWQ_IGNORED.split())
    bits, zeros = _bits(config, "bits", (4,)), config.flag("zero_point", True)
    if not zeros:
        config.refuse("zero_point", zeros, "supported: true")
    return StoredWeights("awq", bits, _group(config), zeros)


def _gptq(config: ConfigReader) -> StoredWeights:
    layout = config.choice("checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    config.choice("format", "gptq", ("gptq", "gptq_v2"))
    config.flag("sym", True)  # zero points are stored either way
    if config.value("pack_dtype", "int32") != "int32":
        config.refuse("pack_dtype", config.value("pack_dtype"), "supported: int32")
    if config.value("dynamic", {}):
        config.refuse("dynamic", config.value("dynamic"), "one format for all weights is supported")
    config.ignore(*_GPTQ_IGNORED.split())
    offset = 1 if layout == "gptq" else 0
    return StoredWeights("gptq", _bits(config, "bits", (4, 8)), _group(config), True, offset)


def _fp8(config: ConfigReader) -> StoredWeights:
    """FP8 with one scale a weight, as AutoFP8 writes it, or one a block (DeepSeek-V3, Qwen3)."""
    config.choice("fmt", "e4m3", ("e4m3", "float8_e4m3fn"))
    config.choice("scale_fmt", "float", ("float", "ue8m0"))  # powers of two, also as exponents
    config.choice("expert_dtype", "fp8", ("fp8",))
    config.ignore(*_FP8_IGNORED.split())
    scheme = config.choice("activation_scheme", "dynamic", ("dynamic", "static"))
    block = config.value("weight_block_size", None)
    if block is None:
        inputs = "tensor" if scheme == "static" else "token"
        return StoredWeights("fp8", 8, None, False, one_scale=True, inputs=inputs)
    if scheme != "dynamic":
        config.refuse("activation_scheme", scheme, "with weight_block_size dynamic is supported")
    rows, group = _block(config, "weight_block_size")
    return StoredWeights("fp8", 8, group, False, inputs="group", block_rows=rows)


def _block(config: ConfigReader, key: str) -> tuple[int, int]:
    """Read how many outputs and inputs share a scale."""
    block = config.value(key)
    good = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) for n in block)
    if not good or block[0] < 1 or block[1] not in GROUPS:
        known = ", ".join(map(str, GROUPS))
        config.refuse(key, block, f"supported: [outputs, inputs] with {known} inputs")
    return block[0], block[1]


def _modelopt(config: ConfigReader) -> StoredWeights:
    """FP8 with one scale a weight and one for its activations, of NVIDIA's Model Optimizer."""
    algorithm = config.value("quant_algo", "")
    if "NVFP4" in str(algorithm):
        config.refuse("quant_algo", algorithm, NVFP4)
    config.choice("quant_algo", "", ("FP8",))
    config.ignore(*_MODELOPT_IGNORED.split())
    return StoredWeights("fp8", 8, None, False, one_scale=True, inputs="tensor")


def _mxfp4(config: ConfigReader) -> StoredWeights:
    """Experts in MXFP4, as gpt-oss stores them."""
    config.ignore("dequantize", "modules_to_not_convert")
    return StoredWeights("mxfp4", 4, 32, False, inputs="float")


def _compressed(config: ConfigReader) -> StoredWeights:
    if config.value("format", "") == "nvfp4-pack-quantized":
        config.refuse("format", "nvfp4-pack-quantized", NVFP4)
    layout = config.choice("format", "", (*_READERS, "int-quantized", "pack-quantized"))
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        if config.value(key, {}):
            config.refuse(key, config.value(key), "not supported")
    config.ignore(*_COMPRESSED_IGNORED.split())
    groups = config.section("config_groups")
    names = list(config.value("config_groups", {}))
    if groups is None or len(names) != 1:
        config.refuse("config_groups", names, "exactly one group is supported")
    scheme = groups.section(names[0])
    if scheme is None:
        groups.refuse(names[0], None, "an object is needed")
    targets = scheme.value("targets", [])
    if targets != ["Linear"]:
        scheme.refuse("targets", targets, "supported: ['Linear']")
    scheme.choice("format", layout, (layout,))
    weights = scheme.section("weights")
    if weights is None:
        scheme.refuse("weights", None, "an object is needed")
    if (read := _READERS.get(layout)) is not None:
        stored = read(weights, scheme)
    else:
        _check_activations(scheme)
        stored = _compressed_weights(weights, layout)
    weights.finish()
    scheme.finish()
    return stored


def _compressed_floats(config: ConfigReader, scheme: ConfigReader) -> StoredWeights:
    config.choice("type", "int", ("float",))
    bits = _bits(config, "num_bits", (8,))
    strategy = config.choice("strategy", "tensor", ("tensor", "channel", "block"))
    rows, group = _block(config, "block_structure") if strategy == "block" else (0, None)
    inputs = _float_activations(scheme, group)
    _stored_scales(config, blocks=strategy == "block")
    for key in ("group_size", "actorder"):
        if config.value(key, None) not in (None, False):
            config.refuse(key, config.value(key), f"it contradicts the strategy '{strategy}'")
    if not config.flag("symmetric", True):
        config.refuse("symmetric", False, "supported: true")
    one_scale = strategy == "tensor"
    return StoredWeights(
        "float-quantized", bits, group, False, one_scale=one_scale, inputs=inputs, block_rows=rows
    )


def _compressed_mxfp4(config: ConfigReader, scheme: ConfigReader) -> StoredWeights:
    """MXFP4; activations, which some checkpoints round to it as well, stay floats."""
    config.choice("type", "int", ("float",))
    _bits(config, "num_bits", (4,))
    config.choice("strategy", "group", ("group",))
    _stored_scales(config)
    if config.value("group_size", 32) != 32:
        config.refuse("group_size", config.value("group_size"), "supported: 32")
    if not config.flag("symmetric", True):
        config.refuse("symmetric", False, "supported: true")
    config.ignore("actorder")
    given = _input_activations(scheme)
    if given is not None:
        given.choice("type", "int", ("float",))
        if not given.flag("dynamic", False):
            given.refuse("dynamic", False, "scales of activations must be dynamic")
        given.ignore("num_bits", "strategy", "symmetric")
        _finish_activations(given)
    return StoredWeights("mxfp4-pack-quantized", 4, 32, False, inputs="float")


_READERS = {"float-quantized": _compressed_floats, "mxfp4-pack-quantized": _compressed_mxfp4}


def _stored_scales(config: ConfigReader, *, blocks: bool = False) -> None:
    config.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    if config.value("dynamic", False):
        config.refuse("dynamic", True, "weights with stored scales are needed")
    if config.value("block_structure", None) and not blocks:
        config.refuse("block_structure", config.value("block_structure"), "not supported")


def _compressed_weights(config: ConfigReader, layout: str) -> StoredWeights:
    config.choice("type", "int", ("int",))
    bits = _bits(config, "num_bits", (8,) if layout == "int-quantized" else (4, 8))
    strategy = config.choice("strategy", "group", ("channel", "group"))
    _stored_scales(config)
    if config.value("actorder", None) not in (None, False, "weight", "static"):
        config.refuse("actorder", config.value("actorder"), "supported: weight, static, null")
    group = _group(config)
    if (group is None) != (strategy == "channel"):
        config.refuse("group_size", group, f"it contradicts the strategy '{strategy}'")
    return StoredWeights(layout, bits, group, not config.flag("symmetric", True))


def _float_activations(scheme: ConfigReader, group: int | None) -> str:
    """Return ``Storage.inputs`` of weights in FP8, which have a scale for a group of inputs."""
    given = _input_activations(scheme)
    if given is None:
        return "float"
    given.choice("type", "int", ("float",))
    _bits(given, "num_bits", (8,))
    dynamic = given.flag("dynamic", False)
    if group is None:
        strategy = given.choice("strategy", "tensor", ("token", "tensor"))
        if (strategy == "token") != dynamic:
            given.refuse("strategy", strategy, "supported: token if dynamic, else tensor")
    else:
        given.choice("strategy", "tensor", ("group",))
        if not dynamic or given.value("group_size", group) != group:
            given.refuse("group_size", given.value("group_size", None), f"supported: {group}")
    if not given.flag("symmetric", True):
        given.refuse("symmetric", False, "supported: true")
    _finish_activations(given)
    if group is not None:
        return "group"
    return "token" if dynamic else "tensor"


def _input_activations(scheme: ConfigReader) -> ConfigReader | None:
    if scheme.value("output_activations", None) is not None:
        scheme.refuse("output_activations", scheme.value("output_activations"), "not supported")
    return scheme.section("input_activations")


def _finish_activations(given: ConfigReader) -> None:
    given.ignore("observer", "observer_kwargs", "group_size")
    given.ignore("scale_dtype", "zp_dtype", "block_structure", "actorder")
    given.finish()


def _check_activations(scheme: ConfigReader) -> None:
    """Take activations that are rounded to 8 bits as they come, as the kernels do by themselves."""
    given = _input_activations(scheme)
    if given is None:
        return
    given.choice("type", "int", ("int",))
    _bits(given, "num_bits", (8,))
    if not given.flag("dynamic", False):
        given.refuse("dynamic", False, "scales of activations must be dynamic")
    given.ignore("strategy", "symmetric")
    _finish_activations(given)
