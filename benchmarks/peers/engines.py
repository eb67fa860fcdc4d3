"""The engines by name: which module has each, and what it is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BANDWIDTH", "ENGINES", "EngineInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """An engine that can be measured.

    `model` is what it is given: "artifact" for what reblock compiled, "transformers", "openvino"
    or "gguf" for the same weights in other files.
    """

    module: str
    attribute: str
    package: str
    model: str
    what: str
    weight_bytes: float = 4
    """Of one weight."""
    has_batching: bool = True
    """Whether requests can come and go while others run."""
    interpreter: str = ""
    """The family that `--peer-python` names; "" for the interpreter of the benchmark itself."""


BANDWIDTH = EngineInfo(
    module="bandwidth", attribute="Engine", package="torch", model="", what="the sum over a buffer"
)

ENGINES = {
    "reblock": EngineInfo(
        module="reblock_engine",
        attribute="Engine",
        package="reblock",
        model="artifact:float32",
        what="float32",
    ),
    "reblock bfloat16": EngineInfo(
        module="reblock_engine",
        attribute="Engine",
        package="reblock",
        model="artifact:bfloat16",
        what="compiled with --dtype bfloat16",
        weight_bytes=2,
    ),
    "reblock bfloat16 weights": EngineInfo(
        module="reblock_engine",
        attribute="Engine",
        package="reblock",
        model="artifact:bfloat16-weights",
        what="compiled with --weight-dtype bfloat16, all else in float32",
        weight_bytes=2,
    ),
    "reblock int8 weights": EngineInfo(
        module="reblock_engine",
        attribute="Engine",
        package="reblock",
        model="artifact:int8-weights",
        what="compiled with --weight-dtype int8, all else in float32",
        weight_bytes=1,
    ),
    "transformers": EngineInfo(
        module="transformers_engine",
        attribute="Static",
        package="transformers",
        model="transformers",
        what="`generate` with a static cache",
        has_batching=False,
        interpreter="transformers",
    ),
    "transformers compiled": EngineInfo(
        module="transformers_engine",
        attribute="Compiled",
        package="transformers",
        model="transformers",
        what="the same, decoding compiled by `torch.compile`; reading a prompt is not",
        has_batching=False,
        interpreter="transformers",
    ),
    "transformers batching": EngineInfo(
        module="transformers_engine",
        attribute="Batching",
        package="transformers",
        model="transformers",
        what="its continuous batching",
        interpreter="transformers",
    ),
    "openvino": EngineInfo(
        module="openvino_engine",
        attribute="Engine",
        package="openvino-genai",
        model="openvino",
        what="`ContinuousBatchingPipeline` of OpenVINO GenAI",
        interpreter="openvino",
    ),
    "llama.cpp": EngineInfo(
        module="llama_engine",
        attribute="Engine",
        package="llama-cpp-python",
        model="gguf",
        what="`llama_decode` through llama-cpp-python, prompts and answers in one batch",
        interpreter="llama.cpp",
    ),
}
