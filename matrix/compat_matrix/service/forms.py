"""The forms of the pages: a person signs in and out, and submits, cancels and retries runs. `guard` checks who sends them."""

import hashlib
import secrets
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from ..errors import MatrixError
from ..pages import submit as submit_page
from ..store import submissions
from . import api_write, cookies, guard, tokens
from .api_write import RunId
from .pages import links, shown
from .site import Site
from .submission import Submission, Submitted

router = APIRouter(include_in_schema=False)

#: What is said of a field that `Submission` refuses.
_WRONG = {
    "only": "A condition has at most 2,000 characters, together with the values that are ticked.",
    "label": "A label is one line of at most 100 characters.",
    "suite": "There is no such suite.",
}


@router.get("/sign-in")
def the_sign_in(request: Request) -> Response:
    """The form that takes a token, or says who is signed in; then the person returns to the page with the link to this one."""
    return _sign_in_page(request, guard.before(request))


def _sign_in_page(request: Request, next: str, wrong: str = "") -> Response:
    page = shown(request, "sign_in", status=401 if wrong else 200, next=next, text="", wrong=wrong)
    page.headers["cache-control"] = "no-store"
    return page


@router.post("/sign-in")
async def sign_in(request: Request) -> Response:
    """Begin a session, and go on to the page from which the person came."""
    form = dict(await _fields(request))
    store, next = request.app.state.site.store, form.get("next", "")
    secret = await run_in_threadpool(tokens.sign_in, store, form.get("token", "").strip())
    if secret is None:
        request.state.wrong()
        said = "This token is wrong, has expired or was revoked." if form.get("token") else "Enter a token."
        return await run_in_threadpool(_sign_in_page, request, next, said)
    await run_in_threadpool(tokens.sign_out, store, cookies.secret_of(request))
    response = RedirectResponse(links(request).root + (next if guard.is_inside(next) else "/runs"), 303)
    cookies.keep(request, response, secret)
    return response


@router.post("/sign-out")
def sign_out(request: Request) -> Response:
    """End the session."""
    tokens.sign_out(request.app.state.site.store, cookies.secret_of(request))
    response = RedirectResponse(links(request)(), 303)
    response.headers["set-cookie"] = cookies.removal(request)
    return response


@router.get("/submit")
def the_submit(request: Request) -> Response:
    """The form that submits a run, with what is in the address, and the cells that it selects."""
    return _submit_page(request, request.query_params.multi_items())


def _submit_page(request: Request, given: Iterable[tuple[str, str]], wrong: str = "", status: int = 200) -> Response:
    site: Site = request.app.state.site
    if not site.suites:
        raise HTTPException(404, "This service runs no cells: it was started with --no-run or without an axes file.")
    form = submit_page.read(given, site.axes)
    plan: dict[str, Any] | None = None
    wanted = _submission(form)
    if wanted and not wrong and (wanted.all or wanted.only):
        try:
            plan = submit_page.plan(site.store, wanted.suite, *site.selected(wanted), site.jobs)
        except MatrixError as error:
            wrong = _said(error)
    page = shown(
        request,
        "submit",
        status=status,
        form=form,
        wrong=wrong,
        plan=plan,
        partial="live" in request.query_params,
        number=secrets.token_urlsafe(9),
        suites=site.suites,
        choices=submit_page.choices(site.axes, form),
        total=sum(not why for why in site.served.values()),
        waiting=len(submissions.waiting(site.store)),
    )
    page.headers["cache-control"] = "no-cache"
    return page


@router.post("/runs")
async def submit(request: Request) -> Response:
    """Submit a run, and go to its page; what is refused is kept in the form and explained."""
    given = await _fields(request)
    made = await run_in_threadpool(_submit, request, given)
    if isinstance(made, Submitted):
        return RedirectResponse(links(request)("runs", made.run), 303)
    return await run_in_threadpool(_submit_page, request, given, made, 422)


def _submit(request: Request, given: Iterable[tuple[str, str]]) -> Submitted | str:
    """Submit the run of a form, once however often it is sent; or what is wrong besides its fields."""
    site: Site = request.app.state.site
    form = submit_page.read(given, site.axes)
    wanted = _submission(form)
    if wanted is None:
        return ""
    if not (wanted.all or wanted.only):
        return "Choose some cells, or all of them."
    same = f"{request.state.token.name}\0{form.number}\0{wanted!r}"
    once = hashlib.sha256(same.encode()).hexdigest()[:8] if form.number else ""
    try:
        return site.submit(wanted, once)
    except MatrixError as error:
        return _said(error)


def _submission(form: submit_page.Form) -> Submission | None:
    """The submission of a form; None if there is something wrong with it, which is added to its errors."""
    try:
        wanted = Submission(only=form.condition, all=form.every, suite=form.suite, label=form.label)
    except ValidationError as error:
        form.errors.update({name: _WRONG[name] for one in error.errors() if (name := str(one["loc"][0])) in _WRONG})
        return None
    return None if form.errors else wanted


def _said(error: MatrixError) -> str:
    if error.__cause__ is not None:  # of the database
        raise error
    return str(error)


@router.post("/runs/{run}/cancel")
def cancel(request: Request, run: RunId) -> Response:
    """Interrupt a run."""
    api_write.cancel(request, run)
    return RedirectResponse(links(request)("runs", run), 303)


@router.post("/runs/{run}/retry")
def retry(request: Request, run: RunId) -> Response:
    """Run the failed and the unfinished cells of a run again."""
    api_write.retry(request, run)
    return RedirectResponse(links(request)("runs", run), 303)


async def _fields(request: Request) -> list[tuple[str, str]]:
    try:
        return guard.fields(await request.body())
    except ValueError:
        raise HTTPException(400, "This isn't a form of this service.") from None
