"""`@ci.inference`: a `request` span around each call of a function. Runs on the caller's thread.

Answers are recognised by their shape, never by their type, so that no framework is imported: the
`usage` of an OpenAI response, the token ids of a Hugging Face `generate`, the items of a stream. A
stream is observed as it passes: no item is held back, and only numbers are kept.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Mapping
from types import AsyncGeneratorType, GeneratorType
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from cirron import errors, guard
from cirron.record import clock, hot, wrap
from cirron.record.value import MAX_TEXT_BYTES, clip

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    F = TypeVar("F", bound=Callable[..., Any])

CAPTURES = ("capture_inputs", "capture_outputs")

# Types of answers that contain nothing to record, which most functions return.
PLAIN = frozenset((type(None), bool, int, float, str, bytes, list, tuple))

# The name of each mark, and its names in a `usage`: of chat completions, and of responses.
USAGE = {
    "prompt_tokens": ("prompt_tokens", "input_tokens"),
    "completion_tokens": ("completion_tokens", "output_tokens"),
}
# Fields of a streamed choice that may have content.
SAID = ("content", "reasoning_content", "refusal", "tool_calls", "function_call")

# The attribute that holds the generator of a stream: `openai.Stream`, Starlette's
# `StreamingResponse`, Flask's `Response`.
STREAMED_FROM = ("_iterator", "body_iterator", "response")
# The events that `openai` derives from the chunks of a chat, and the attribute with new text.
EVENTS = {
    "content.delta": "delta",
    "content.done": "",
    "refusal.delta": "delta",
    "refusal.done": "",
    "tool_calls.function.arguments.delta": "arguments_delta",
    "tool_calls.function.arguments.done": "",
    "logprobs.content.delta": "",
    "logprobs.content.done": "",
    "logprobs.refusal.delta": "",
    "logprobs.refusal.done": "",
}


@overload
def inference(function: F, /, *, config: Mapping[str, Any] | None = None) -> F: ...
@overload
def inference(*, config: Mapping[str, Any] | None = None) -> Callable[[F], F]: ...
def inference(function: Any = None, /, *, config: Any = None) -> Any:
    """Record each call of a function as a `request` span with an id, and mark its token counts.

    The marks are tokens from an OpenAI-shaped `usage`, the lengths of a Hugging Face `generate`,
    and time to first token and tokens per second of a stream. With `capture_inputs` and
    `capture_outputs` in `config`, the inputs and outputs are recorded too; other keys of `config`
    become an attribute of each request.

    >>> @ci.inference
    ... def answer(messages):
    ...     return client.chat.completions.create(model="small", messages=messages)
    """
    checked = check(config)
    if function is None:
        return lambda function: inference(function, config=config)
    is_method = isinstance(function, (classmethod, staticmethod))
    target = function.__func__ if is_method else function
    if inspect.isclass(target) or not callable(target):
        raise errors.InputError(
            f"ci.inference decorates functions and methods; got {function!r}."
            " Write @ci.inference or @ci.inference(config={...}) above the function"
        )
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    parameters = signature(target) if checked is not None and checked.inputs else None

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Request | None:
        if hot.off:
            return None
        request = Request(name, checked, args, kwargs)
        if checked is not None:
            with guard.quiet("inference"):
                request.note(parameters)
        return request

    return wrap.in_call(function, begin)


class Config(NamedTuple):
    inputs: bool
    outputs: bool
    flags: dict[str, Any]  # the user's own


def check(config: Any) -> Config | None:
    """The config, or None if it is empty; raises if it is invalid."""
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise errors.out_of_range("config", config, "it must be a dict")
    flags = {key: value for key, value in config.items() if key not in CAPTURES}
    for key in flags:
        if isinstance(key, str) and key.startswith("capture_"):
            raise errors.one_of("config key", key, CAPTURES)
    for key in CAPTURES:
        if not isinstance(config.get(key, False), bool):
            raise errors.one_of(f"config[{key!r}]", config[key], (True, False))
    inputs, outputs = (config.get(key, False) for key in CAPTURES)
    return Config(inputs, outputs, flags) if config else None


class Request(wrap.Call):
    """One call of a decorated function, until its answer or its last item is delivered."""

    __slots__ = ("_args", "_config", "_kwargs", "_stream")

    def __init__(
        self, name: str, config: Config | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        span = hot.begin("request")
        given = kwargs.get("request_id")
        request_id = given if given.__class__ is str else clock.ids.hex(span.sequence)
        span.attrs = {"request_id": request_id, "function": name}
        super().__init__(span)
        self._config = config
        self._args = args
        self._kwargs = kwargs
        self._stream: Stream | None = None

    def note(self, parameters: inspect.Signature | None) -> None:
        """Records the inputs and flags that the config asks for."""
        assert self._config is not None
        if self._config.flags:
            self.span.set(config=self._config.flags)
        if parameters is not None:
            try:
                given = parameters.bind(*self._args, **self._kwargs).arguments
            except TypeError:  # the function will raise this too
                return
            kept = {key: brief(given[key]) for key in given if key not in ("self", "cls")}
            self.span.set(inputs=kept)

    # -- the result -------------------------------------------------------------------------

    def returned(self, value: Any) -> Any:
        if (value.__class__ not in PLAIN or self._config is not None) and not self.span.end:
            try:
                stream = self._follow(value)
                if stream is not None:
                    self._args, self._kwargs = (), {}  # the stream may live for long
                    return stream
                self._look(value)
            except Exception as error:  # noqa: BLE001  protects the answer
                guard.caught("inference", error)
        self.close()
        return value

    def _follow(self, value: Any) -> Any:
        """The value if it is a stream or holds one, which the request then follows; else None."""
        if type(value) in wrap.RETURNED:
            return wrap.follow(value, self)
        held = field(value, "__dict__")
        if type(held) is dict:
            for name in STREAMED_FROM:
                if type(held.get(name)) in (GeneratorType, AsyncGeneratorType):
                    setattr(value, name, wrap.follow(held[name], self))
                    if name == "_iterator" and callable(field(value, "close")):
                        self._see_close(value)
                    return value
        return None

    def _see_close(self, stream: Any) -> None:
        """Ends the request when the stream is closed, directly or by `with`.

        Closing it closes the connection but not the generator, which may never be resumed.
        """

        def leave(args: object, kwargs: object) -> None:
            if not self.span.end:
                self.failed(GeneratorExit())

        stream.close = wrap.in_call(stream.close, leave)

    def _look(self, value: Any) -> None:
        self._mark_usage(usage_of(value))
        output_length = length_of(value) or length_of(field(value, "sequences"))
        if output_length is not None:
            input_length = self._input_length()
            if input_length is not None:
                self._mark("input_length", input_length)
                self._mark("output_length", output_length)
        if self._config is not None and self._config.outputs:
            self.span.set(output=brief(text_of(value) or value))

    def _input_length(self) -> int | None:
        named = (self._kwargs.get("input_ids"), self._kwargs.get("inputs"))
        for value in (*named, *self._args):
            length = length_of(value) or length_of(field(value, "input_ids"))
            if length is not None:
                return length
        return None

    def yielded(self, item: Any) -> None:
        if self.span.end:  # too deeply nested, or already recorded by a shutdown
            return
        try:
            stream = self._stream
            if stream is None:
                stream = self._stream = Stream()
            is_first = stream.take(item)
            if is_first:
                self._mark("time_to_first_token_s", (stream.first_ns - self.span.start) / 1e9)
        except Exception as error:  # noqa: BLE001  protects the stream
            guard.caught("inference", error)

    def exhausted(self, value: Any) -> None:
        self._sum_up()
        self.close()

    def failed(self, error: BaseException) -> None:
        self._sum_up()
        if issubclass(type(error), GeneratorExit):  # not isinstance(): see `record/value.py`
            self.span.set(abandoned=True)
        super().failed(error)

    def _sum_up(self) -> None:
        stream = self._stream
        if stream is None or self.span.end:
            return
        with guard.quiet("inference"):
            count = self._mark_usage(stream.usage) or stream.tokens
            passed_ns = stream.last_ns - stream.first_ns
            if count > 1 and passed_ns:
                self._mark("tokens_per_second", (count - 1) * 1e9 / passed_ns)
            if self._config is not None and self._config.outputs:
                self.span.set(output=clip(stream.text))

    def _mark_usage(self, usage: Any) -> int | None:
        """Marks the token counts that are known; returns the number of generated tokens."""
        count = None
        if usage is not None:
            for name, keys in USAGE.items():
                counts = (field(usage, key) for key in keys)
                count = next((count for count in counts if type(count) is int), None)
                if count is not None:
                    self._mark(name, count)
        return count

    def _mark(self, name: str, value: float) -> None:
        """Adds a mark to the request, even if a scope inside it is open."""
        innermost = hot.leave_context()
        hot.enter_context(self.span)
        hot.mark(name, value, "summary")
        hot.enter_context(innermost)


class Stream:
    """The state of a stream so far."""

    __slots__ = ("first_ns", "last_ns", "text", "tokens", "usage")

    def __init__(self) -> None:
        self.tokens = 0
        self.first_ns = self.last_ns = 0
        self.usage: Any = None
        self.text = ""  # the beginning of it

    def take(self, item: Any) -> bool:
        """Counts an item; True if it has the first token."""
        said = item if item.__class__ is str else said_in(item)
        usage = None if item.__class__ is str else usage_of(item)
        if usage is not None:
            self.usage = usage  # the last one counts: some servers send it with each chunk
        if not said:
            return False
        self.tokens += 1
        self.last_ns = hot.now()
        if said.__class__ is str and len(self.text) < MAX_TEXT_BYTES:
            self.text += said[:MAX_TEXT_BYTES]
        if self.tokens > 1:
            return False
        self.first_ns = self.last_ns
        return True


# -- the shapes of answers -------------------------------------------------------------------


def field(value: Any, name: str) -> Any:
    """An attribute, or the item of a dict; None if it does not exist."""
    try:
        return value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    except Exception:  # noqa: BLE001  a property that raises must not break the answer
        return None


def usage_of(value: Any) -> Any:
    """The `usage` of a response, of a chunk, or of an event that contains one of them."""
    for holder in (value, field(value, "response"), field(value, "chunk")):
        usage = field(holder, "usage")
        if usage is not None:
            return usage
    return None


def said_in(item: Any) -> Any:
    """The content of an item of a stream: its text, or another true value; false if it has none.

    Chunks of a chat may have only a role or a usage, and only some events of a chat or a response
    have text. An item of any other kind counts as one token.
    """
    choices = field(item, "choices")
    if isinstance(choices, (list, tuple)):
        return text_of(item)
    kind = field(item, "type")
    if isinstance(kind, str):
        if kind.startswith("response."):
            return field(item, "delta") if kind.endswith(".delta") else None
        if kind in EVENTS:
            return field(item, EVENTS[kind])
        if kind == "chunk" and field(field(item, "chunk"), "choices") is not None:
            return None  # its content also comes as an event
    return bool(item) if item.__class__ is bytes else item is not None


def text_of(value: Any) -> Any:
    """The content of the first choice that has any: of a completion, a chat or a chunk."""
    choices = field(value, "choices")
    for choice in choices if isinstance(choices, (list, tuple)) else ():
        message = field(choice, "delta") or field(choice, "message")
        for said in (field(choice, "text"), *(field(message, name) for name in SAID)):
            if said:
                return said
    return None


def length_of(value: Any) -> int | None:
    """The number of tokens per row, if the value is a batch of token ids: a 2-d integer array."""
    shape = field(value, "shape")
    if isinstance(shape, tuple) and len(shape) == 2:
        kind = str(field(value, "dtype")).rpartition(".")[2]  # "torch.int64" in torch
        if kind in ("int64", "int32"):
            return int(shape[1])
    return None


# -- captured inputs and outputs -------------------------------------------------------------

_short = reprlib.Repr()
_short.maxstring = _short.maxother = MAX_TEXT_BYTES


def brief(value: Any) -> Any:
    """A short form of a value: a scalar itself, the beginning of a text, the shape of an array."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return clip(value)
    shape = field(value, "shape")
    if isinstance(shape, tuple):
        return f"{type(value).__name__} {list(shape)} {field(value, 'dtype')}"
    return clip(_short.repr(value))


def signature(function: Any) -> inspect.Signature:
    """The function's signature, or a generic one for a native function without a signature."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.signature(lambda *args, **kwargs: None)
