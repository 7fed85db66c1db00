"""Frames survive being cut anywhere, and what isn't a number is refused by name."""

from __future__ import annotations

import math
from typing import Any, get_args

import msgspec
import numpy
import pytest
from hypothesis import given, strategies as st

from everstep.protocol import framing, memory_messages, template_messages, wire, worker_messages


@given(st.lists(st.binary(max_size=300), max_size=20), st.lists(st.integers(1, 97), min_size=1))
def test_frames_come_out_as_they_went_in_however_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    frames = framing.Frames()
    out: list[bytes] = []
    n = 0
    while stream:
        cut = cuts[n % len(cuts)]
        out += frames.feed(stream[:cut])
        stream = stream[cut:]
        n += 1
    assert out == bodies


def test_something_that_is_not_the_protocol_is_refused() -> None:
    with pytest.raises(ValueError, match="not Everstep's protocol"):
        framing.Frames().feed(b"GET / HTTP/1.1\r\n")


@pytest.mark.parametrize("value", [numpy.float32(1.5), numpy.int8(3), numpy.array(2.5), numpy.bool_(True)])
def test_numpy_scalars_are_numbers(value: object) -> None:
    encoded = msgspec.msgpack.Encoder(enc_hook=framing.encode_odd).encode({"x": value})
    assert msgspec.msgpack.decode(encoded) == {"x": value.item()}  # type: ignore[attr-defined]


def test_an_array_is_not_a_number_and_is_named() -> None:
    with pytest.raises(TypeError, match=r"numpy\.ndarray is not a number"):
        msgspec.msgpack.Encoder(enc_hook=framing.encode_odd).encode({"x": numpy.ones(3)})


DECODERS = {
    wire.AnyToAgent: wire.to_agent,
    wire.AnyFromAgent: wire.from_agent,
    worker_messages.AnyFromWorker: worker_messages.from_worker,
    worker_messages.AnyToWorker: worker_messages.to_worker,
    template_messages.AnyOrder: template_messages.order,
    template_messages.AnyMessage: template_messages.message,
    memory_messages.AnyRequest: memory_messages.memory_request,
    memory_messages.Slots | memory_messages.Stored: memory_messages.memory_answer,
}
MESSAGES = [
    pytest.param(decoder, kind, id=kind.__name__)
    for union, decoder in DECODERS.items()
    for kind in get_args(union)
]


def some(kind: Any) -> Any:
    """A value of this type, with something in everything that may be empty or absent."""
    match msgspec.inspect.type_info(kind) if not isinstance(kind, msgspec.inspect.Type) else kind:
        case msgspec.inspect.StructType() | msgspec.inspect.DataclassType() as whole:
            return whole.cls(**{field.name: some(field.type) for field in whole.fields})
        case msgspec.inspect.NamedTupleType() as whole:
            return whole.cls(*(some(field.type) for field in whole.fields))
        case msgspec.inspect.UnionType(types):
            return some(next(t for t in types if not isinstance(t, msgspec.inspect.NoneType)))
        case msgspec.inspect.ListType(item):
            return [some(item)]
        case msgspec.inspect.VarTupleType(item):
            return (some(item),)
        case msgspec.inspect.TupleType(items):
            return tuple(map(some, items))
        case msgspec.inspect.DictType(key, value):
            return {some(key): some(value)}
        case msgspec.inspect.EnumType(choices):
            return list(choices)[-1]
        case msgspec.inspect.RawType():
            return msgspec.Raw(msgspec.msgpack.encode({"loss": 0.5}))
        case msgspec.inspect.LiteralType(choices):
            return choices[-1]
        case msgspec.inspect.BoolType():
            return True
        case msgspec.inspect.IntType():
            return 7
        case msgspec.inspect.FloatType():
            return 2.5
        case msgspec.inspect.StrType():
            return "a word"
        case msgspec.inspect.BytesType():
            return b"\x00bytes"
        case other:
            raise TypeError(f"no value for {other}: add a case")


@pytest.mark.parametrize(("decoder", "kind"), MESSAGES)
def test_every_message_can_be_read_back(decoder: msgspec.msgpack.Decoder[Any], kind: type) -> None:
    message = some(kind)
    (body,) = framing.Frames().feed(framing.frame(message))
    back = decoder.decode(body)
    assert type(back) is kind
    assert back == message


def test_every_kind_of_message_is_among_these() -> None:
    tried = {param.values[1] for param in MESSAGES}
    for module in (wire, worker_messages, template_messages, memory_messages):
        tagged = {
            kind
            for kind in vars(module).values()
            if isinstance(kind, type)
            and issubclass(kind, msgspec.Struct)
            and kind.__module__ == module.__name__
            and kind.__struct_config__.tag is not None
            and not kind.__subclasses__()
        }
        assert tagged - tried == set(get_args(worker_messages.AnyValue) if module is worker_messages else ())


def test_a_loss_that_is_not_a_number_can_be_read_back() -> None:
    report = worker_messages.Report(7, msgspec.Raw(msgspec.msgpack.encode({"loss": float("nan")})))
    (body,) = framing.Frames().feed(framing.frame(report))
    assert math.isnan(msgspec.msgpack.decode(worker_messages.from_worker.decode(body).metrics)["loss"])


def test_all_that_a_user_may_send_fits_into_a_frame_with_what_goes_around_it() -> None:
    answer = framing.frame(worker_messages.Answer(1, bytes(framing.MAX_PAYLOAD)))
    told = framing.frame(wire.ToWorkers(1, 1, [0], answer))
    (body,) = framing.Frames().feed(told)
    assert len(body) > framing.MAX_PAYLOAD
    with pytest.raises(ValueError, match=r"a Answer message of \d+ bytes: at most"):
        framing.frame(worker_messages.Answer(1, bytes(framing.MAX_FRAME)))


def test_a_text_of_any_length_is_clipped_to_its_beginning_and_its_end() -> None:
    assert framing.clip("short") == "short"
    clipped = framing.clip("first " + "x" * 10_000_000 + " last")
    assert clipped.startswith("first xxx")
    assert clipped.endswith("xxx last")
    assert len(clipped) < 2 * framing.MAX_TEXT
