"""Bodies of requests in OpenAI's format, as far as they are served.

What is not served is refused by name: fields that no class has, and values other than those given
here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

Stops = str | list[str] | None
Idle = Annotated[Any, Field(description="accepted, and without effect")]


def _empty(given: dict[str, float] | None) -> dict[str, float] | None:
    if given:
        raise PydanticCustomError("extra_forbidden", "is not supported")
    return given


class Body(BaseModel):
    """A request; fields that it does not have are refused, and null is a field left out."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None}


class StreamOptions(Body):
    """include_usage: a last event tells the counts of tokens."""

    include_usage: bool = False
    include_obfuscation: Idle = None


class Sampling(Body):
    """What completions and chats have in common.

    top_k and repetition_penalty are not OpenAI's; they are those of `oxytorch.llm.generate`.
    temperature: OpenAI's default is 1; 0 takes the most likely token, as top_p of 0 does.
    """

    model: str
    temperature: float = Field(1.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, ge=0.0, le=1.0)
    top_k: int | None = Field(None, ge=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100.0)
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    n: int = Field(1, ge=1)
    stop: Stops = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, float] | None, AfterValidator(_empty)] = None
    user: str | None = None


class Completion(Sampling):
    """POST /v1/completions; a prompt is text or tokens, or several of either."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: Literal[1] | None = None


class TextFormat(Body):
    """The only response format that is served."""

    type: Literal["text"]


class Chat(Sampling):
    """POST /v1/chat/completions.

    tools: are given to the model's chat template; what the model generates stays text.
    """

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    response_format: TextFormat | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: Idle = None
    metadata: Idle = None
    store: Idle = None
    service_tier: Idle = None
    prompt_cache_key: Idle = None
    safety_identifier: Idle = None


class Embeddings(Body):
    """POST /v1/embeddings."""

    model: str
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    user: str | None = None


class Rerank(Body):
    """POST /v1/rerank, as Jina and Cohere have it."""

    model: str
    query: str
    documents: list[str | dict[str, Any]] = Field(min_length=1)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False


def schema(model: type[Body]) -> dict[str, Any]:
    """What /docs says of a route's body."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}
