"""An Atom feed: cells that failed after they had passed, and the reports of `adopt` on new releases."""

import json
import re
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import func, select

from ..pages.render import Links, environment
from ..store import Past, Store
from ..store import queries as stored
from ..store.documents import NEWS, kept
from ..store.models import RESULT, RUN
from ..views.common import one_line
from ..words import clean

#: The number of entries, and of the newest results that are searched for cells that broke.
_MOST, _RESULTS = 50, 20_000


def entries(store: Store) -> list[tuple[datetime, str, str, str, str]]:
    """The entries, newest first: when it was, a stable identifier, the title, the text and the path of its page."""
    found, links = [], Links()
    for (cell, run, summary, _), before in broke(store):
        key = _id(f"{run.id}/{cell}/{summary.attempt}")
        title = f"{cell} broke: {one_line(summary.reason) or summary.kind or 'it failed'}"
        said = f"{cell} failed in {run.id} ({summary.kind or 'test'}), and passed in {before}.\n\n{summary.reason}"
        link = links("cells", cell.name, run=run.id, attempt=summary.attempt)
        found.append((summary.started or run.started, key, title, said, link))
    for document in kept(store, NEWS, _MOST):
        report: dict[str, Any] = json.loads(document.content)
        key = _id(f"watch/{document.id}/{document.made.isoformat()}")
        link = links("runs", report["run"]) if report.get("run") else links("seams")
        found.append((document.made, key, one_line(report["title"]), report["text"], link))
    return sorted(found, key=lambda entry: entry[0], reverse=True)[:_MOST]


def broke(store: Store) -> list[tuple[Past, str]]:
    """The latest cells that failed after they had passed, newest first, each with the id of the run in which they had."""
    return [(stored.past_of(row), row[stored.SUMMARY]) for row in store.rows(_BROKE)]


_newest = select(func.max(RESULT.c.id)).scalar_subquery()
_last = func.max(RESULT.c.attempt).over(partition_by=(RESULT.c.run_id, RESULT.c.cell_id)).label("last")
_window = (RESULT.c.id > _newest - _RESULTS, stored.HAS_ENDED)
_failing = select(RESULT.c.cell_id).where(*_window, RESULT.c.verdict == "failed")
_fields = (RESULT.c.id, RESULT.c.run_id, RESULT.c.cell_id, RESULT.c.attempt, RESULT.c.verdict)
_some = select(*_fields, _last).where(*_window, RESULT.c.cell_id.in_(_failing)).subquery()
_over: dict[str, Any] = {"partition_by": _some.c.cell_id, "order_by": RUN.c.id}
_before = (
    func.lag(_some.c.verdict).over(**_over).label("before"),
    func.lag(RUN.c.name).over(**_over).label("run_before"),
)
_ends = select(_some.c.id, _some.c.verdict, *_before).join(RUN, RUN.c.id == _some.c.run_id)
_ended = _ends.where(_some.c.attempt == _some.c.last, RUN.c.partial.is_(False)).subquery()
_BROKE = (
    stored.summary(_ended.c.run_before, *stored.RUN_FIELDS)
    .join(_ended, _ended.c.id == RESULT.c.id)
    .where(_ended.c.verdict == "failed", _ended.c.before != "failed")
    .order_by(*stored.NEWEST_FIRST, RESULT.c.id.desc())
    .limit(_MOST)
)


def atom(found: Sequence[tuple[datetime, str, str, str, str]], base: str) -> bytes:
    """The feed as XML, with the service's address as the client uses it."""
    text = environment().get_template("feed.xml").render(entries=found, base=clean(base).rstrip("/"), id=_id("feed"))
    return re.sub("[\ufffe\uffff]", "\N{REPLACEMENT CHARACTER}", text).encode()  # not in XML


def _id(key: str) -> str:
    return uuid.uuid5(uuid.NAMESPACE_URL, f"kernel-compat-matrix/{key}").urn
