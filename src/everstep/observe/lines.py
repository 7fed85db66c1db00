"""Records of a journal as lines for people, and as JSON for programs."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from everstep.control import commands as c
from everstep.journal import records
from everstep.journal.records import RESTARTED, AnyRecord
from everstep.observe.display import describe
from everstep.wording import count, named, verb

_VALIDATIONS = {
    "VALIDATED": "validated {}",
    "VALIDATION_FAILED": "the validation of {} failed",
    "VALIDATION_TIMEOUT": "the validation of {} took too long",
    "COMMITTED": "{} is not validated any more",
}


def in_words(record: AnyRecord) -> str:
    """A record as one line."""
    match record:
        case records.Opened():
            least, most = record.workers_min, record.workers_max
            workers = f"{least}" if least == most else f"{least} to {most}"
            return (
                f"opened by {record.owner} under lease {record.lease}; "
                f"{workers} workers, everstep {record.version}"
            )
        case records.Renewed():
            return "driver heartbeat"
        case records.TakenOver():
            return f"took over the workers of attempt {record.epoch}, which never stopped"
        case records.Placed():
            return _places_in_words(record)
        case records.Committed():
            metrics = metrics_in_words(msgspec.msgpack.decode(record.metrics))
            where = f" at {record.external}" if record.external else ""
            return f"committed {record.folder}{where}: {metrics}"
        case records.Validated():
            found = msgspec.msgpack.decode(record.metrics)
            metrics = f": {metrics_in_words(found)}" if found else ""
            return _VALIDATIONS[record.status].format(record.folder) + metrics
        case records.Deleted():
            return f"deleted {record.folder}"
        case records.Damaged():
            return f"{record.folder} can't be restored any more: {record.reason}"
        case records.Metrics():
            last = record.first + len(record.rows) - 1
            which = f"report {last}" if last == record.first else f"reports {record.first} to {last}"
            newest = f": {metrics_in_words(msgspec.msgpack.decode(record.rows[-1]))}" if record.rows else ""
            return f"attempt {record.epoch}: {which}{newest}"
        case records.Stalled():
            return f"attempt {record.epoch}: training waited {record.seconds:.2f} s for checkpoints"
        case records.Closed():
            return f"ended: {ending_in_words(record.outcome, record.message)}"
        case records.Compacted():
            return f"what came before is in {count(len(record.archives), 'archive')} now"
        case c.PhaseChanged():
            return f"attempt {record.epoch}: {record.phase}"
        case c.CheckpointKept():
            return f"keeping {record.folder}"
        case c.FailureSeen() if record.failure.echo:
            return describe(c.FailureSeen(record.at, msgspec.structs.replace(record.failure, echo=False))) + (
                " (as a consequence)"
            )
        case c.HangSeen():
            hangs = f"{named('rank', record.ranks)} {verb(record.ranks, 'hangs', 'hang')}"
            return f"{hangs} ({record.action}): stacks in {record.stacks}"
        case records.StragglerSeen() if record.over == RESTARTED:
            was, restarts = verb(record.ranks, "was", "were"), verb(record.ranks, "restarts", "restart")
            return f"attempt {record.epoch}: {named('rank', record.ranks)} {was} slow, and {restarts}"
        case _:
            return describe(record) or _tag(record)


def _places_in_words(record: records.Placed) -> str:
    hosts = {place.host for place in record.places}
    said = f"{count(len(record.places), 'worker')} placed on {count(len(hosts), 'host')}"
    return f"{said}; {count(len(record.gone), 'worker')} less" if record.gone else said


def to_json(record: AnyRecord, when: float | None) -> str:
    """A record as a line of JSON: its type, its UNIX time where it has one, and all of its fields."""
    fields = msgspec.structs.asdict(record)
    match record:
        case records.Committed() | records.Validated():
            fields["metrics"] = msgspec.msgpack.decode(record.metrics)
        case records.Metrics():
            fields["rows"] = [msgspec.msgpack.decode(row) for row in record.rows]
        case records.Closed() if record.value is not None:
            fields["value"] = msgspec.msgpack.decode(record.value)
        case _:
            pass
    plain = finite(msgspec.to_builtins(fields, str_keys=True))
    return json.dumps({"type": _tag(record), "time": when, **plain}, allow_nan=False, ensure_ascii=False)


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they are the strings that JavaScript and Python's float() read."""
    match value:
        case float():
            if value != value:
                return "NaN"
            if value in (float("inf"), float("-inf")):
                return "Infinity" if value > 0 else "-Infinity"
            return value
        case dict():
            return {key: finite(each) for key, each in value.items()}
        case list() | tuple():
            return [finite(each) for each in value]
        case _:
            return value


def _tag(record: AnyRecord) -> str:
    return str(record.__struct_config__.tag)


def ending_in_words(outcome: str, message: str) -> str:
    return f"{outcome}: {message}" if message not in ("", outcome) else outcome


def metrics_in_words(metrics: dict[str, Any]) -> str:
    said = ", ".join(
        f"{key}={value:.6g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in metrics.items()
    )
    return (said if len(said) <= 200 else said[:199] + "…") or "no metrics"
