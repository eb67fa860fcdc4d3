"""When requests arrive and how long they are: read from a file, or made from a seed.

A file is JSON: an array of objects, or one object a line.

    {"arrival_s": 0.25, "num_prompt_tokens": 512, "num_new_tokens": 128}
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reblock.errors import BadArtifact, CorruptArtifact, UsageError
from reblock.json_fields import MAX_JSON_BYTES, JsonFields, parse_json_object

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reblock.engine.limits import EngineLimits

__all__ = [
    "MAX_ARRIVAL_S",
    "MAX_REQUESTS",
    "TokenRange",
    "Trace",
    "TraceRequest",
    "format_trace",
    "make_trace",
    "read_trace",
]

MAX_REQUESTS = 32_768
"""In one trace; so many are a file that `read_trace` still reads."""

MAX_ARRIVAL_S = 7 * 24 * 60 * 60
"""No request arrives later than a week after the first could."""

_KEYS = ("arrival_s", "num_prompt_tokens", "num_new_tokens")
_NS_PER_S = 10**9
_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request: when it arrives, counted from the start, and its tokens."""

    arrival_s: float
    num_prompt_tokens: int
    num_new_tokens: int

    @property
    def arrival_ns(self) -> int:
        """When it arrives, in whole nanoseconds."""
        return round(self.arrival_s * _NS_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in the order in which they arrive; one at least.

    Raises ValueError where they are in another order, or there are none.
    """

    requests: tuple[TraceRequest, ...]

    def __post_init__(self) -> None:
        times = [request.arrival_s for request in self.requests]
        if not times or times != sorted(times):
            raise ValueError("a trace needs requests, in the order in which they arrive")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRange:
    """Numbers of tokens from `fewest` to `most`, both included.

    Raises ValueError where there are none.
    """

    fewest: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.fewest <= self.most <= _MAX_TOKENS:
            raise ValueError(
                f"from {self.fewest} to {self.most} tokens: it must be from 1 or more to no less, "
                f"and to {_MAX_TOKENS:,} at most"
            )

    def draw(self, source: random.Random) -> int:
        """Return one of the numbers, each of them as probable as the others."""
        return source.randint(self.fewest, self.most)


def read_trace(path: str) -> Trace:
    """Return the requests of a file, in the order in which they arrive.

    Raises:
        UsageError: it cannot be read, is too large, or is no trace; the message says where.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the trace {path!r}: {error.strerror}") from error
    if len(data) > MAX_JSON_BYTES:
        raise UsageError(f"the trace {path!r} is larger than {MAX_JSON_BYTES:,} bytes")
    try:
        requests = [_read_request(fields) for fields in _objects(data, path)]
    except BadArtifact as error:
        raise UsageError(f"no trace of requests: {error}") from error
    if not 1 <= len(requests) <= MAX_REQUESTS:
        raise UsageError(
            f"the trace {path!r} holds {len(requests):,} requests, and must hold from 1 to "
            f"{MAX_REQUESTS:,}"
        )
    return Trace(requests=tuple(sorted(requests, key=lambda request: request.arrival_s)))


def format_trace(trace: Trace) -> str:
    """Return the text of a file that `read_trace` reads, one request a line."""
    lines = (
        json.dumps({key: getattr(request, key) for key in _KEYS}) for request in trace.requests
    )
    return "".join(f"{line}\n" for line in lines)


def make_trace(
    *,
    seed: int,
    num_requests: int,
    limits: EngineLimits,
    rate_per_s: float | None = None,
    prompt_tokens: TokenRange | None = None,
    new_tokens: TokenRange | None = None,
) -> Trace:
    """Return requests that arrive at random, the first at once; the same for the same arguments.

    Args:
        seed: of all that is drawn.
        num_requests: how many.
        limits: what the lengths are taken from where they are not given: a prompt and an answer
            may each be half as long as both together can be.
        rate_per_s: how many arrive in a second on average, independently of each other (a Poisson
            process); None for all at once.
        prompt_tokens: lengths of the prompts, each as probable as the others.
        new_tokens: lengths of the answers.

    Raises:
        UsageError: a number is out of range, or the last request would arrive after a week.
    """
    if not 1 <= num_requests <= MAX_REQUESTS:
        raise UsageError(
            f"a trace has from 1 to {MAX_REQUESTS:,} requests, and {num_requests:,} were asked for"
        )
    if rate_per_s is not None and not 0 < rate_per_s < math.inf:
        raise UsageError(f"the rate must be a number of requests above 0, not {rate_per_s!r}")
    half = TokenRange(fewest=1, most=max(1, limits.max_request_tokens // 2))
    source = random.Random(seed)  # noqa: S311  it has to be repeatable
    arrival_s, requests = 0.0, []
    for _ in range(num_requests):
        requests.append(
            TraceRequest(
                arrival_s=round(arrival_s, 6),
                num_prompt_tokens=(prompt_tokens or half).draw(source),
                num_new_tokens=(new_tokens or half).draw(source),
            )
        )
        if rate_per_s is not None:
            arrival_s -= math.log(1.0 - source.random()) / rate_per_s
    if requests[-1].arrival_s > MAX_ARRIVAL_S:
        raise UsageError(
            f"the last of {num_requests:,} requests would arrive after more than "
            f"{MAX_ARRIVAL_S:,} s, which are the limit: ask for fewer requests, or for more of "
            "them in a second"
        )
    return Trace(requests=tuple(requests))


def _objects(data: bytes, path: str) -> Iterator[JsonFields]:
    """The objects of an array, or of lines; what is too much is refused before it is parsed."""
    if data.lstrip().startswith(b"["):
        whole = parse_json_object(b'{"requests": ' + data + b"}", path=path)
        if len(whole) > 1:
            raise CorruptArtifact("has more than one array", path=path)
        fields = JsonFields(whole, path=path)
        yield from fields.nested_list("requests")
        return
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            where = f"{path}, line {number}"
            yield JsonFields(parse_json_object(line, path=where), path=where)


def _read_request(fields: JsonFields) -> TraceRequest:
    # People write traces too, so a key that is not known is no sign of a newer version.
    if unknown := [key for key in fields.values if key not in _KEYS]:
        raise fields.corrupt(unknown[0], f"is not known; known are {', '.join(_KEYS)}")
    return TraceRequest(
        arrival_s=fields.number("arrival_s", maximum=MAX_ARRIVAL_S),
        num_prompt_tokens=fields.integer("num_prompt_tokens"),
        num_new_tokens=fields.integer("num_new_tokens"),
    )
