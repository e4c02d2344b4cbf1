"""The forms of the pages: signing in and out, and submitting runs, through a real server, by clients that act as browsers do."""

from __future__ import annotations

import base64
import dataclasses
import html
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
import requests
from served import served
from small import TAG, Small
from sqlalchemy import delete, select, update
from stored import failed, passed, stored
from waiting import LONG

from compat_matrix.axes import Axes
from compat_matrix.cells import Cell, parse
from compat_matrix.cli import main
from compat_matrix.service import tokens
from compat_matrix.service.app import create_app
from compat_matrix.service.guard import Settings
from compat_matrix.store import Store, inserts, submissions
from compat_matrix.store.models import SUBMISSION, TOKEN

EXCLUDED = "transformers 5.2 needs torch 2.11"
NO_RUN = "20261121-114502-7f3a"
ACCEPT = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


class Person(requests.Session):
    """A browser at one service: it keeps cookies, and says with a form which page has sent it."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.url = url
        self.headers.update(ACCEPT)

    def request(self, method: str, url: Any, *args: Any, **more: Any) -> requests.Response:
        if method == "POST":
            more["headers"] = {"sec-fetch-site": "same-origin"} | more.get("headers", {})
        return super().request(method, f"{self.url}{url}", *args, **{"timeout": 30, "allow_redirects": False} | more)

    @property
    def secret(self) -> str:
        """What the cookie has."""
        secret = self.cookies["kernel-compat-matrix"]
        assert secret is not None
        return secret

    def sign_in(self, token: str, **form: str) -> requests.Response:
        return self.post("/sign-in", data={"token": token, **form})

    @property
    def signed_in(self) -> bool:
        return "Signed in as" in self.get("/runs").text


@pytest.fixture
def axes(small: Small) -> Axes:
    more = f'[[exclude]]\nwhen = "transformers==5.2 and torch==2.10"\nbecause = "{EXCLUDED}"'
    return small.axes(["5.0", "5.1", "5.2"], ["2.10", "2.11"], more=more)


@pytest.fixture
def settings() -> Settings:
    return Settings()


@pytest.fixture
def address(store: Store, axes: Axes, settings: Settings) -> Iterator[str]:
    with served(create_app(store, axes, settings)) as url:
        yield url


@pytest.fixture
def token(store: Store) -> str:
    return tokens.add(store, "me", ["submit"])


@pytest.fixture
def me(address: str, token: str) -> Person:
    person = Person(address)
    assert person.sign_in(token).status_code == 303
    return person


def fields(page: str) -> list[tuple[str, str]]:
    """What a browser would send with the form on the page, in which nothing is changed."""
    found = []
    for tag in re.findall(r"<input [^>]*>", page):
        one = dict(re.findall(r'([a-z]+)="([^"]*)"', tag))
        if "name" in one and (one.get("type") != "checkbox" or " checked" in tag):
            found.append((one["name"], html.unescape(one.get("value", ""))))
    return found + [("suite", one) for one in re.findall(r"<option selected>([^<]+)", page)]


def running(store: Store, run: str, cell: Cell, log: str) -> None:
    """Let a cell of a submitted run run now, with this end of its log."""
    since = datetime.now(timezone.utc).isoformat()
    values = {"host": "worker-1", "running": json.dumps({cell.name: (since, log)})}
    with store.writing() as connection:
        own = SUBMISSION.c.run_id == inserts.key(connection, run)
        connection.execute(update(SUBMISSION).where(own).values(values))


def words(page: str) -> str:
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", page).split()))


# Sessions.


def test_a_person_signs_in_once_and_out(address: str, store: Store, token: str) -> None:
    person = Person(address)
    assert "Sign in" in person.get("/runs").text
    page = person.get("/sign-in", headers={"referer": f"{address}/runs?before=x"})
    assert ("next", "/runs?before=x") in fields(page.text)
    found = person.sign_in(f" {token}\n", next="/runs?before=x")
    assert (found.status_code, found.headers["location"]) == (303, "/runs?before=x")
    cookie = found.headers["set-cookie"]
    assert re.fullmatch(r"kernel-compat-matrix=[\w-]{43}; HttpOnly; Max-Age=604800; Path=/; SameSite=lax", cookie), (
        cookie
    )
    assert person.signed_in
    assert "You are signed in as <strong>me</strong>" in person.get("/sign-in").text
    secret = person.secret
    assert person.post(f"/runs/{NO_RUN}/cancel").status_code == 404
    found = person.post("/sign-out")
    assert (found.status_code, found.headers["location"], person.cookies.get_dict()) == (303, "/", {})
    assert not person.signed_in
    # A copy of the cookie is worth nothing now.
    thief = Person(address)
    thief.cookies.set("kernel-compat-matrix", secret)
    assert not thief.signed_in
    assert thief.post("/runs", data={"all": "yes"}).status_code == 401
    assert store.runs() == []


def test_a_page_of_a_signed_in_person_is_not_that_of_another(me: Person) -> None:
    """Neither a browser after signing in, nor a cache before the service, may take the page of the one for that of the other."""
    own, others = me.get("/runs"), Person(me.url).get("/runs")
    assert own.headers["etag"] != others.headers["etag"]
    assert (own.headers["cache-control"], others.headers["cache-control"]) == ("private, no-cache", "no-cache")
    for one in (own, others):
        assert me.get("/runs", headers={"if-none-match": one.headers["etag"]}).status_code == (
            304 if one is own else 200
        )
    assert me.get("/sign-in").headers["cache-control"] == "no-store"


def test_a_session_ends_with_its_token_and_its_time(me: Person, store: Store, token: str) -> None:
    def end(**values: object) -> int:
        with store.writing() as connection:
            return connection.execute(update(TOKEN).where(TOKEN.c.name.contains("@")).values(**values)).rowcount

    tokens.revoke(store, "me")
    assert me.post("/runs", data={"all": "yes"}).status_code == 401
    assert me.cookies.get_dict() == {}  # it is deleted
    assert Person(me.url).sign_in(token).status_code == 401
    short = tokens.add(store, "short", ["submit"], days=7)
    assert me.sign_in(short).status_code == 303
    assert me.signed_in
    with store.writing() as connection:  # the token ends before its session
        connection.execute(update(TOKEN).where(TOKEN.c.name == "short").values(expires=datetime.now(timezone.utc)))
    assert not me.signed_in
    assert me.sign_in(tokens.add(store, "long", ["submit"])).status_code == 303
    assert me.signed_in
    assert end(expires=datetime.now(timezone.utc) - timedelta(seconds=1)) == 3
    assert not me.signed_in
    assert me.sign_in(tokens.add(store, "last", ["submit"])).status_code == 303
    assert end(revoked=datetime.now(timezone.utc)) == 1  # those that are over are gone
    assert not me.signed_in


def test_a_session_can_be_listed_and_revoked_alone(
    me: Person, store: Store, token: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Person(me.url)
    other.sign_in(token)
    assert main(["token", "list", "--store", store.url]) == 0
    listed = re.findall(r"^(me@\w+) +session +valid until", capsys.readouterr().out, re.MULTILINE)
    assert len(listed) == 2
    digest = select(TOKEN.c.digest).where(TOKEN.c.name == listed[0])
    tokens.revoke(store, listed[0])
    assert [me.signed_in, other.signed_in].count(True) == 1
    assert token not in str(store.rows(digest))


def test_a_session_is_no_token_and_a_token_no_session(me: Person, token: str) -> None:
    secret = me.secret
    assert secret != token
    other = Person(me.url)
    other.cookies.set("kernel-compat-matrix", token)
    assert other.post("/runs", data={"all": "yes"}).status_code == 401
    for header in (f"Bearer {secret}", f"Basic {base64.b64encode(f'me:{secret}'.encode()).decode()}"):
        assert requests.get(f"{me.url}/runs", headers={"authorization": header}, timeout=LONG).status_code == 401
    assert Person(me.url).sign_in(secret).status_code == 401
    # The API takes no cookie for writing: it doesn't ask where a request is from.
    for origin in ({}, {"sec-fetch-site": "same-origin"}):
        found = me.post("/api/v1/runs", json={"all": True}, headers={"sec-fetch-site": "", **origin})
        assert (found.status_code, found.json()) == (401, {"detail": "this needs a token"})


def test_a_session_that_was_there_before_is_not_the_one_after(me: Person, store: Store, token: str) -> None:
    """Whoever could give a browser a cookie before doesn't have its session afterwards."""
    fixed = Person(me.url)
    fixed.cookies.set("kernel-compat-matrix", "chosen-by-somebody-else")
    fixed.sign_in(token)
    secrets = {one.value for one in fixed.cookies if one.value}
    assert len(secrets - {"chosen-by-somebody-else"}) == 1
    before = me.secret
    assert me.sign_in(token).status_code == 303
    assert me.secret != before
    assert tokens.of_session(store, before) is None


def test_another_site_can_not_sign_a_person_in_or_out(me: Person, store: Store, token: str) -> None:
    other = Person(me.url)
    host = urlsplit(me.url).netloc
    for origin in (
        {"sec-fetch-site": "cross-site", "origin": "https://evil.example"},
        {"sec-fetch-site": "same-site"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "", "origin": "https://evil.example"},
        {"sec-fetch-site": "", "origin": "null"},
        {"sec-fetch-site": ""},
        {"sec-fetch-site": "", "referer": f"{me.url}/sign-in"},
    ):
        assert other.post("/sign-in", data={"token": token}, headers=origin).status_code == 403
        assert me.post("/sign-out", headers=origin).status_code == 403
        assert me.post("/runs", data={"all": "yes"}, headers=origin).status_code == 403
    assert other.cookies.get_dict() == {}
    assert me.signed_in
    assert store.runs() == []
    # A browser without Sec-Fetch-Site; and one whose connection somebody on the network can change.
    ours = {"sec-fetch-site": "", "origin": f"http://{host}"}
    assert me.post(f"/runs/{NO_RUN}/cancel", headers=ours).status_code == 404
    tls = {"x-forwarded-proto": "https", "cookie": f"__Host-kernel-compat-matrix={me.secret}"}
    cancel = f"/runs/{NO_RUN}/cancel"
    assert me.post(cancel, headers={**ours, **tls}).status_code == 403
    assert me.post(cancel, headers={**ours, **tls, "origin": f"https://{host}"}).status_code == 404
    assert me.post(f"/runs/{NO_RUN}/cancel", headers={**ours, "origin": f"https://{host}"}).status_code == 404


@pytest.mark.parametrize(
    "to",
    [
        *("https://evil.example/", "//evil.example", "/\\evil.example", "/\t/evil.example", "\\\\evil.example", ""),
        *("javascript:alert(1)", "/a\r\nX-Injected: yes", "/ä b", "evil.example"),
    ],
)
def test_a_person_who_signs_in_stays_here(address: str, token: str, to: str) -> None:
    person = Person(address)
    found = person.sign_in(token, next=to)
    assert (found.status_code, found.headers["location"]) == (303, "/runs")
    assert "x-injected" not in found.headers
    for referer in (
        "https://evil.example/runs",
        f"{address}.evil.example/x",
        "http://[::",
        "x",
        "://",
        f"{address}//evil.example",
    ):
        page = person.get("/sign-in", headers={"referer": referer})
        assert page.status_code == 200
        assert dict(fields(page.text))["next"] in ("", "//evil.example")  # which is refused, as above


@pytest.mark.parametrize("settings", [Settings(failures_per_minute=4, writes_per_minute=5)])
def test_rates_of_the_api_are_those_of_the_pages(address: str, store: Store, token: str) -> None:
    person = Person(address)
    assert [person.sign_in("guess").status_code for _ in range(3)] == [401] * 3
    bearer = {"authorization": "Bearer guess"}
    assert requests.post(f"{address}/api/v1/runs", headers=bearer, timeout=LONG).status_code == 401
    assert [person.sign_in("guess").status_code for _ in range(2)] == [429] * 2
    assert 1 <= int(person.sign_in("guess").headers["retry-after"]) <= 60
    person.cookies.set("kernel-compat-matrix", "guess")
    assert person.get("/runs").status_code == 429
    person.cookies.clear()
    # Who has a token isn't locked out, nor a browser that still sends an old password.
    old = {"authorization": f"Basic {base64.b64encode(b'me:old').decode()}"}
    assert person.post("/sign-in", data={"token": token}, headers=old).status_code == 303
    assert [person.post(f"/runs/{NO_RUN}/cancel").status_code for _ in range(6)] == [404] * 5 + [429]
    cancel = f"{address}/api/v1/runs/{NO_RUN}/cancel"
    assert requests.post(cancel, headers={"authorization": f"Bearer {token}"}, timeout=LONG).status_code == 429


def test_a_wrong_token_is_explained_and_is_nowhere(address: str, capfd: pytest.CaptureFixture[str]) -> None:
    person = Person(address)
    found = person.sign_in("hunter2hunter2", next="/submit?only=torch%3D%3D2.11")
    assert found.status_code == 401
    assert "This token is wrong, has expired or was revoked." in words(found.text)
    assert ("next", "/submit?only=torch%3D%3D2.11") in fields(found.text)
    assert "Enter a token." in words(person.sign_in("").text)
    assert "hunter2" not in found.text + str(found.headers)
    assert "hunter2" not in "".join(capfd.readouterr())
    assert person.post("/sign-in", data=b"\xff\xfe=%ff").status_code in (400, 401)


@pytest.mark.parametrize("settings", [Settings(read="token")])
def test_a_closed_service_is_read_by_who_has_signed_in(address: str, store: Store, token: str) -> None:
    person = Person(address)
    found = person.get("/runs?before=x")
    assert (found.status_code, found.headers["www-authenticate"]) == (401, "Bearer")  # the browser asks for no password
    assert ("next", "/runs?before=x") in fields(found.text)
    (style,) = re.findall(r'href="(/static/style[^"]+)"', found.text)
    assert person.get(style).status_code == 200
    assert person.get("/sign-in").status_code == 200
    assert person.get("/api/v1/runs").status_code == 401
    person.sign_in(tokens.add(store, "reader", ["read"]))
    assert (person.get("/runs").status_code, person.get("/api/v1/runs").status_code) == (200, 200)
    found = person.post("/runs", data={"all": "yes"})
    assert (found.status_code, "this needs a token with the scope submit" in found.text) == (401, True)
    assert "Signed in as </span>reader" in found.text
    assert ("next", "/submit?all=yes") in fields(found.text)
    tokens.revoke(store, "reader")
    assert person.get("/runs").status_code == 401
    assert store.runs() == []


def test_below_the_path_of_a_proxy_with_tls(store: Store, axes: Axes, token: str) -> None:
    with served(create_app(store, axes, Settings()), root_path="/matrix") as url:
        person = Person(url)
        tls = {"x-forwarded-proto": "https"}
        page = person.get("/sign-in", headers=tls | {"referer": f"{url}/matrix/submit"})
        assert ("next", "/submit") in fields(page.text)
        assert 'action="/matrix/sign-in"' in page.text
        found = person.post("/sign-in", data={"token": token, "next": "/submit"}, headers=tls)
        assert found.headers["location"] == "/matrix/submit"
        cookie, where = found.headers["set-cookie"].split("; ", 1)
        name, _, secret = cookie.partition("=")
        assert name == "__Secure-kernel-compat-matrix"
        assert where == "HttpOnly; Max-Age=604800; Path=/matrix; SameSite=lax; Secure"
        signed_in = {"cookie": f"{name}={secret}"} | tls
        page = person.get("/submit", headers=signed_in)
        assert "Signed in as" in page.text
        assert 'action="/matrix/runs"' in page.text
        found = person.post("/runs", data={"all": "yes"}, headers=signed_in)
        assert found.headers["location"] == f"/matrix/runs/{store.runs()[0].id}"
        ended = person.post("/runs", data={"only": "torch==2.11"}, headers=tls)
        assert ("next", "/submit?only=torch%3D%3D2.11") in fields(ended.text)
    with served(create_app(store, axes, Settings())) as url:
        found = Person(url).post("/sign-in", data={"token": token}, headers=tls)
        assert found.headers["set-cookie"].startswith("__Host-kernel-compat-matrix=")
        assert "Path=/; SameSite=lax; Secure" in found.headers["set-cookie"]


def test_two_services_on_one_database_know_the_same_sessions(me: Person, store: Store, axes: Axes) -> None:
    with Store.open(store.url) as second, served(create_app(second, axes, Settings())) as url:
        other = Person(url)
        other.cookies.set("kernel-compat-matrix", me.secret)
        assert other.signed_in
        assert other.post("/sign-out").status_code == 303
    assert not me.signed_in


# Submitting.


def test_check_boxes_and_a_condition_select_cells(me: Person, store: Store, axes: Axes) -> None:
    cells = axes.cells
    stored(store, [passed(one) for one in cells[:2]])
    page = me.get("/submit").text
    assert re.findall(r'name="(transformers|torch|python)" value="([\d.]+)"', page) == [
        *(("transformers", one) for one in ("5.2", "5.1", "5.0")),
        *(("torch", one) for one in ("2.11", "2.10")),
    ]
    assert "Nothing is chosen yet" in page
    query = [("transformers", "5.2"), ("transformers", "5.0"), ("only", "torch==2.10 or torch==2.11")]
    shown = words(me.get("/submit", params=query).text)
    assert "3 cells would run" in shown
    assert f"1 {EXCLUDED}" in shown
    assert "Such a cell took 1.0 s, the median of the newest results of 2 of them" in shown or "took" in shown
    found = me.post("/runs", data=[*query, ("label", "mine"), ("suite", "default")])
    run = store.runs()[0]
    assert (found.headers["location"], run.label) == (f"/runs/{run.id}", "mine")
    assert run.command == "run '--only=transformers in (5.2, 5.0) and (torch==2.10 or torch==2.11)'"
    states = [one.state for one in store.summary(run.id).values()]
    assert sorted(states) == ["excluded", *["unfinished"] * 3]
    assert "1 run comes first." in words(me.get("/submit", params={"all": "yes"}).text)


def test_how_long_cells_took(me: Person, store: Store, axes: Axes) -> None:
    def said(**query: str) -> str:
        return words(me.get("/submit", params=query).text)

    assert "No cell of this suite has run yet" in said(all="yes")
    new, old = (parse(f"{TAG}-tf5.{n}-torch2.11") for n in (1, 0))
    stored(store, [passed(old)])
    assert "None of them has run yet; of 1 other cell the median is" in said(transformers="5.1")
    stored(store, [passed(new)])
    assert "the median of the newest results of 1 of them" in said(transformers="5.1")


@pytest.mark.parametrize(
    ("form", "field", "said"),
    [
        ({"only": "torch==2.11 and ("}, "only", "this isn't a condition on cells"),
        ({"only": "tork==2.11"}, "only", "there is no axis 'tork'"),
        ({"only": "torch==new"}, "only", "torch is a release such as 5.4"),
        ({"all": "yes", "only": "torch==2.11"}, "all", "Either all cells, or those that are chosen"),
        ({"torch": "9.9"}, "torch", "There is no cell with torch 9.9."),
        ({"all": "yes", "label": "a\nb"}, "label", "A label is one line of at most 100 characters."),
        ({"all": "yes", "suite": "a b"}, "suite", "There is no such suite."),
        ({"only": "torch==2.11 and " * 200 + "torch==2.11"}, "only", "A condition has at most 2,000 characters"),
        ({"only": "torch==2.12"}, "plan", "no cell of axes.toml matches 'torch==2.12'"),
        ({"transformers": "5.2", "torch": "2.10"}, "plan", EXCLUDED),
        ({"all": "yes", "suite": "other"}, "plan", "axes.toml has the suites default, not 'other'"),
        ({}, "plan", "Choose some cells, or all of them."),
    ],
)
def test_bad_input_is_explained_beside_its_field_and_kept(
    me: Person, store: Store, form: dict[str, str], field: str, said: str
) -> None:
    form = {"label": "<kept>", **form}
    found = me.post("/runs", data=form)
    assert found.status_code == 422
    beside = (
        r'<p id="planned"[^>]*>(.*?)</p>' if field == "plan" else rf'<span[^>]* id="{field}-error"[^>]*>(.*?)</span>'
    )
    (text,) = re.findall(beside, found.text, re.DOTALL)
    assert said in words(text)
    if field not in ("plan", "torch"):
        assert re.search(rf'id="{field}"[^>]*aria-invalid="true"|aria-invalid="true"[^>]*id="{field}"', found.text)
    kept = dict(fields(found.text))
    for name, value in form.items():
        if name not in ("suite", field) or name in ("only", "all"):
            assert kept[name] == value.strip(), name
    assert store.runs() == []


def test_a_form_that_is_sent_twice_is_one_run(me: Person, store: Store) -> None:
    form = [*fields(me.get("/submit", params={"torch": "2.11"}).text), ("label", "mine")]
    assert dict(form)["form"]
    with ThreadPoolExecutor(8) as pool:  # two clicks, a browser that tries again, a replay
        found = [*pool.map(lambda _: me.post("/runs", data=form), range(8))]
    (run,) = store.runs()
    assert {(one.status_code, one.headers["location"]) for one in found} == {(303, f"/runs/{run.id}")}
    assert len(submissions.waiting(store)) == 1
    # The same form with another input, another person's, and another form with the same input are other runs.
    me.post("/runs", data=[*form, ("label", "changed")])
    assert len(store.runs()) == 2
    other = Person(me.url)
    other.sign_in(tokens.add(store, "other", ["submit"]))
    other.post("/runs", data=form)
    assert len(store.runs()) == 3
    again = [*fields(me.get("/submit", params={"torch": "2.11"}).text), ("label", "mine")]
    assert dict(again)["form"] != dict(form)["form"]
    me.post("/runs", data=again)
    assert len(store.runs()) == 4
    for _ in range(2):  # without the number, as from a script
        me.post("/runs", data={"torch": "2.11"})
    assert len(store.runs()) == 6


def test_a_session_that_ends_in_the_middle_of_a_form_loses_nothing(me: Person, store: Store, token: str) -> None:
    form = {"transformers": ["5.1", "5.0"], "only": "torch==2.11 or torch>2.9 & <b>", "label": 'a "label"', "form": "x"}
    with store.writing() as connection:
        connection.execute(update(TOKEN).where(TOKEN.c.name.contains("@")).values(expires=datetime.now(timezone.utc)))
    found = me.post("/runs", data=form)
    assert (found.status_code, "your session has ended" in found.text) == (401, True)
    next = dict(fields(found.text))["next"]
    found = me.sign_in(token, next=next)
    assert found.headers["location"] == next
    kept = fields(me.get(next).text)
    assert [value for name, value in kept if name == "transformers"] == ["5.1", "5.0"]
    assert (dict(kept)["only"], dict(kept)["label"]) == (form["only"], form["label"])
    assert dict(kept)["form"] != "x"
    assert dict(parse_qsl(urlsplit(next).query)).keys() == {"transformers", "only", "label"}
    assert store.runs() == []
    # A form that is too long for an address isn't kept, and the page is there all the same.
    me.post("/sign-out")
    long = me.post("/runs", data={"only": "x" * 10_000})
    assert dict(fields(long.text))["next"] == "/submit"
    assert dict(fields(me.post(f"/runs/{NO_RUN}/cancel").text))["next"] == f"/runs/{NO_RUN}"


def test_whoever_may_submit_may_cancel_as_in_the_api(me: Person, store: Store) -> None:
    other = tokens.add(store, "other", ["submit"])
    for cancel in (
        lambda run: me.post(f"/runs/{run}/cancel").status_code,
        lambda run: (
            requests.post(
                f"{me.url}/api/v1/runs/{run}/cancel", headers={"authorization": f"Bearer {other}"}, timeout=LONG
            ).status_code
        ),
    ):
        me.post("/runs", data={"all": "yes"})
        run = store.runs()[0].id
        assert cancel(run) in (303, 204)
        assert store.run(run).state == "interrupted"
    page = me.get(f"/runs/{run}").text
    assert "Yes, cancel it" not in page
    assert f'action="/runs/{run}/retry"' in page
    assert me.post(f"/runs/{run}/retry").status_code == 303
    page = words(me.get(f"/runs/{run}").text)
    assert "Yes, cancel it" in page
    assert "5 cells end without a new result." in page


def test_a_part_of_the_page_shows_the_choice_anew(me: Person) -> None:
    part = me.get("/submit", params={"live": "form", "torch": "2.11", "only": "("}).text
    assert "<html" not in part
    assert re.search(r'<span class="problem" id="only-error" hx-swap-oob="true">this isn', part)
    assert "Nothing can run yet" in part
    assert "3 cells would run" in words(me.get("/submit", params={"live": "form", "torch": "2.11"}).text)


def test_a_run_shows_how_far_it_is(me: Person, store: Store, axes: Axes) -> None:
    me.post("/runs", data={"all": "yes"})
    me.post("/runs", data={"torch": "2.11"})
    second, first = (one.id for one in store.runs())
    assert "0 of 5 cells are done. It waits for a service." in words(me.get(f"/runs/{first}").text)
    assert "1 run comes first." in words(me.get(f"/runs/{second}").text)
    store.add(first, passed(axes.cells[0]))
    running(store, first, axes.cells[1], "collected 3 items\n\x1b[31m<red>\x1b[0m")
    page = me.get(f"/runs/{first}").text
    assert "1 of 5 cells is done, about" in words(page)
    assert f"{axes.cells[1]} on worker-1, since" in words(page)
    assert "collected 3 items\n&lt;red&gt;</pre>" in page
    part = re.search(r'hx-get="([^"]+)"', page)
    assert part is not None
    live = html.unescape(part[1])
    assert me.get(live).status_code == 204
    home = me.get("/")
    running(store, first, axes.cells[1], "collected 3 items\ntest_it.py .")
    assert "test_it.py .</pre>" in me.get(live).text
    # Pages that don't show the log aren't made anew for it.
    assert me.get("/", headers={"if-none-match": home.headers["etag"]}).status_code == 304
    submissions.cancel(store, first)
    ended = me.get(live).text
    assert "interrupted" in ended
    assert "progress" not in ended
    assert f'action="/runs/{first}/retry"' in ended


def test_an_error_leads_back(address: str, me: Person, store: Store, axes: Axes) -> None:
    def back(response: requests.Response) -> list[str]:
        assert response.status_code >= 400
        return re.findall(r'<a href="([^"]*)">Back</a>', response.text)

    (cell, *_) = axes.cells
    run = stored(store, [passed(cell)])
    assert back(me.post(f"/runs/{run}/retry")) == [f"/runs/{run}"]  # there is nothing to retry
    assert back(me.get("/runs/nothing", headers={"referer": f"{address}/runs?before={run}"})) == [f"/runs?before={run}"]
    assert back(me.get("/cells/nothing")) == []
    for elsewhere in ("https://evil.example/", f"{address}.evil.example/", f"{address}//evil.example/", address):
        assert back(me.get("/nothing", headers={"referer": elsewhere})) == []
    sent = me.post(f"/runs/{run}/retry", headers={"sec-fetch-site": "cross-site"})
    assert "another site" in sent.text
    assert back(sent) == []


def test_a_retry_shows_what_is_run_again(me: Person, store: Store, axes: Axes) -> None:
    me.post("/runs", data={"torch": "2.11"})
    run = store.runs()[0].id
    cells = [one for one in axes.cells if one.torch == "2.11"]
    for cell, make in zip(cells, (passed, failed, failed), strict=True):
        store.add(run, make(cell))
    with store.writing() as connection:
        connection.execute(delete(SUBMISSION))
        inserts.finish(connection, inserts.key(connection, run), "finished")
    assert me.post(f"/runs/{run}/retry").status_code == 303
    page = words(me.get(f"/runs/{run}").text)
    assert "1 of 3 cells is done" in page
    assert "2 cells end without a new result." in page
    store.add(run, dataclasses.replace(passed(cells[1]), attempt=2))
    assert "2 of 3 cells are done" in words(me.get(f"/runs/{run}").text)
