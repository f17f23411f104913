"""The pages of the viewer, their addresses, and who may request them. `ROUTES` at the end lists all of them.

Everything is read on request, so that a run in training shows its newest step. Pages load only their own files
(Content-Security-Policy) and templates escape text. A request that names a host other than the loopback address, as a
web page could send by DNS rebinding, is refused.
"""

import json
import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import duckdb
import msgspec
from starlette.applications import Starlette
from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from verl_ext.pages import curves
from verl_ext.pages.page import SERVED_POLICY, STATIC, environment, render
from verl_ext.view import data, export, group, problems, timeline, tokens

HOST = "127.0.0.1"
HEADERS = {
    "content-security-policy": SERVED_POLICY,
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


async def guard(request: Request, answer: RequestResponseEndpoint) -> Response:
    """Refuse other hosts, and put HEADERS on every answer."""
    # Browsers leave :80 out.
    hosts = [f"{name}:{request.app.state.port}".removesuffix(":80") for name in (HOST, "localhost")]
    if request.headers.get("host") in hosts:
        response = await answer(request)
    else:
        response = PlainTextResponse(f"This viewer answers to {' and '.join(hosts)} only. Open that address.\n", 421)
    response.headers.update(HEADERS)
    return response


def overview(request: Request) -> Response:
    """Show the run page: curves of all runs, and each run's problems. `seen`: the runs' state before it was made."""
    seen = bytes(state(request).body).decode()
    shown = [(run.name, run.number, run.metrics()) for run in request.app.state.runs]
    beside = request.query_params.get("published")
    questions = curves.charts([*shown, ("published", None, curves.published())] if beside else shown)
    return page(request, "runs.html", questions=questions, published=beside, seen=seen)


def state(request: Request) -> Response:
    return JSONResponse([run.state() for run in request.app.state.runs])


def diagnose(request: Request) -> Response:
    """Show docs/guides/diagnose.md line by line, so that an alarm can point at a line."""
    if not curves.DIAGNOSE.is_file():
        raise HTTPException(404, "docs/guides/diagnose.md is not installed here. It is in the repository.")
    return page(request, "diagnose.html", lines=curves.DIAGNOSE.read_text(encoding="utf-8").splitlines())


def open_step(request: Request) -> Response:
    """Redirect to the records of a step, or to those of the nearest step that has some."""
    run, step = run_of(request), request.path_params["step"]
    files, asked = run.files(), f"step_{step:06d}"
    found = [(abs(data.step_of(key) - step), data.is_validation(key), key) for key in files]
    if asked not in files:  # a validation of the step does not stand for it
        refuse_damaged(run, asked, f"val_{step:06d}")
    if not found:
        raise HTTPException(404, f"{run.name} has no records of rollouts, so step {step} cannot be opened.")
    far, _, key = min(found)
    return RedirectResponse(f"/run/{run.number}/{key}{f'?asked={step}' if far else ''}")


def step_page(request: Request) -> Response:
    """Show a row per group with a dot per sample, for one step, or for all steps if none is named."""
    run = run_of(request)
    key = key_of(request, run) if "key" in request.path_params else None
    filters = {name: value for name in data.FILTERS if (value := request.query_params.get(name, ""))}
    number = request.query_params.get("page", "0")
    if not re.fullmatch(r"[0-9]{1,6}", number):
        raise HTTPException(400, f"page is {number!r}, expected a whole number from 0.")
    if (sort := request.query_params.get("sort", "")) not in data.SORTS:
        raise HTTPException(400, f"sort is {sort!r}, expected one of {', '.join(filter(None, data.SORTS))}, or none.")
    keys = None if key is None else [key]
    found, choices = data.groups(run, keys, filters, int(number), sort), data.choices(run, keys)
    values = {"number": int(number), "page_size": data.PAGE, "steps": list(run.files()), "sort": sort}
    return page(request, "step.html", run=run, key=key, found=found, filters=filters, choices=choices, **values)


def group_page(request: Request) -> Response:
    """Show the samples of a prompt side by side."""
    run, key, rows = group_of(request)
    two = [sample_of(rows, request.query_params[name]) for name in ("a", "b") if name in request.query_params]
    diff = group.diff(*two) if len(two) == 2 else None
    return page(request, "group.html", run=run, key=key, rows=rows, diff=diff, most=group.most_shown(rows))


def sample_page(request: Request) -> Response:
    """Show one response: why it got its reward, what it says, and how each token was trained."""
    run, key, rows = group_of(request)
    row = sample_of(rows, request.query_params.get("session"))
    if request.query_params.get("raw"):
        # A value that is not a number becomes null, and characters that reverse or hide text are escaped.
        return PlainTextResponse(json.dumps(msgspec.json.decode(msgspec.json.encode(row)), indent=1))
    sql = "SELECT * FROM records WHERE uid = $uid AND session = $session ORDER BY position"
    told = run.ask(sql, {name: row[name] for name in ("uid", "session")}, "tokens", [key])
    lens = tokens.lens(told, row["turns"], request.query_params.get("row", ""))
    colour = next((name for name in tokens.COLOURED if name == request.query_params.get("colour")), "advantage")
    return page(request, "sample.html", run=run, key=key, row=row, rows=rows, colour=colour, **lens)


def timeline_page(request: Request) -> Response:
    """Show a step's time; `timeline.json` is in Chrome's trace format."""
    run = run_of(request)
    key = key_of(request, run)
    rows = timeline.intervals(run, key)
    if request.url.path.endswith(".json"):
        named = {"Content-Disposition": f'attachment; filename="{key}.trace.json"'}
        return JSONResponse(export.trace(rows), headers=named)
    return page(request, "timeline.html", run=run, key=key, rows=rows, asked=timeline.prompts(run, key))


def eval_file(request: Request) -> Response:
    """Send the rollouts of a run in inspect_ai's format."""
    run = run_of(request)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.eval"
        export.write_eval(run, list(run.files()), path)
        file, size = path.open("rb"), path.stat().st_size  # it can be read to its end after its name is gone
    headers = {"Content-Disposition": 'attachment; filename="run.eval"', "Content-Length": str(size)}
    return StreamingResponse(iter(partial(file.read, 1 << 20), b""), headers=headers, media_type="application/zip")


def problem_page(request: Request) -> Response:
    problem = request.query_params.get("problem", "")
    draws, asked = problems.draws(request.app.state.runs, problem), problems.prompts(request.app.state.runs, [problem])
    return page(request, "problem.html", problem=problem, draws=draws, asked=asked.get(problem))


def problems_page(request: Request) -> Response:
    """Compare two sides on the problems that both have, for example the first and the last validation."""
    offered = {f"{run.number}:{side}": (run, side) for run in request.app.state.runs for side in problems.sides(run)}
    names = [request.query_params.get(name, "") for name in ("a", "b")]
    chosen = [offered[name] for name in names] if offered.keys() >= set(names) else []
    again = bool(chosen) and chosen[0][0] is chosen[1][0] and {side for _, side in chosen} == {"first", "last"}
    samples = [problems.samples(*side, again=again) for side in chosen]
    if again and not all(samples):
        raise HTTPException(404, f"{chosen[0][0].name} drew no problem in two steps. Choose other sides.")
    if empty := [
        f"{problems.named(side)} of {run.name}" for (run, side), rows in zip(chosen, samples, strict=False) if not rows
    ]:
        raise HTTPException(404, f"{empty[0]}: no rollouts whose fate is known. Choose another side.")
    found = problems.compare(*samples) if samples else None
    if samples and not found:
        raise HTTPException(404, "No problem has judged samples on both sides. Choose other sides.")
    asked = problems.prompts(request.app.state.runs, [name for name, *_ in found["problems"]]) if found else {}
    return page(request, "problems.html", offered=offered, found=found, asked=asked)


def page(request: Request, template: str, **values: Any) -> Response:
    """Return a page; with `?export=1`, as a file that holds all that it needs and links to nothing."""
    exported, whole = request.query_params.get("export"), request.url.include_query_params(export=1)
    values |= {"query": request.query_params, "path": request.url.path, "runs": request.app.state.runs}
    values["file"] = f"{request.url.path}?{whole.query}"
    html = render(TEMPLATES.get_template(template), as_file=bool(exported), **values)
    if not exported:
        return HTMLResponse(html)
    uid = request.query_params.get("uid", "")
    name = re.sub(r"[^\w.-]+", "_", f"{request.url.path} {uid}", flags=re.ASCII).strip("_") or "runs"
    return HTMLResponse(html, headers={"Content-Disposition": f'attachment; filename="{name}.html"'})


def refuse(request: Request, error: Exception) -> Response:
    """Show what was wrong with a request; an error of ours is named, and the command's terminal has its traceback."""
    status, message = 500, f"The viewer failed ({type(error).__name__}: {error}). Its terminal shows the traceback."
    if isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    elif isinstance(error, duckdb.OutOfMemoryException):
        status, most = 413, data.DATABASE["memory_limit"]
        message = f"This page needs more than {most} of memory, the viewer's limit. Open a step or a group."
    html = render(TEMPLATES.get_template("message.html"), as_file=False, message=message)
    return HTMLResponse(html, status, HEADERS)


def run_of(request: Request) -> data.Run:
    runs, number = request.app.state.runs, request.path_params["run"]
    if number >= len(runs):
        raise HTTPException(404, f"There is no run {number}. The command line names {len(runs)}, counted from 0.")
    return runs[number]


def key_of(request: Request, run: data.Run) -> str:
    key, files = request.path_params["key"], run.files()
    if key not in files:
        refuse_damaged(run, key)
        raise HTTPException(404, f"{run.name} has no readable records {key!r}. It has {', '.join(files) or 'none'}.")
    return key


def refuse_damaged(run: data.Run, *keys: str) -> None:
    for key, fault in run.faults():
        if key in keys:
            raise HTTPException(404, f"{data.label(key)} of {run.name} is damaged, or cannot be read now: {fault}")


def group_of(request: Request) -> tuple[data.Run, str, list[dict[str, Any]]]:
    run = run_of(request)
    key, uid = key_of(request, run), request.query_params.get("uid", "")
    if not (rows := run.ask("SELECT * FROM records WHERE uid = $uid ORDER BY session", {"uid": uid}, keys=[key])):
        refuse_damaged(run, key)  # this query may have found the damage
        raise HTTPException(404, f"{data.label(key)} of {run.name} has no group {uid!r}.")
    return run, key, [data.without_holes(row) for row in rows]


def sample_of(rows: Sequence[dict[str, Any]], session: str | None) -> dict[str, Any]:
    if found := [row for row in rows if str(row["session"]) == session]:
        return found[0]
    raise HTTPException(
        404, f"There is no such sample. This group has the sessions {', '.join(str(row['session']) for row in rows)}."
    )


def address(path: str, **query: Any) -> str:
    """Return an address of this viewer; parameters that are None are left out."""
    return f"{path}?{urlencode({name: value for name, value in query.items() if value is not None})}"


TEMPLATES = environment(
    Path(__file__).parent / "templates",
    step_of=data.step_of,
    label=data.label,
    side=problems.named,
    address=address,
    group=group,
    timeline=timeline,
    token_columns=tokens.COLOURED,
    marks=data.MARKS,
    sorts=data.SORTS,
)


class Number(IntegerConvertor):
    regex = "[0-9]{1,9}"  # `int` refuses more than 4,300 digits


register_url_convertor("number", Number())
ROUTES = {
    "/": overview,
    "/state.json": state,
    "/diagnose": diagnose,
    "/problem": problem_page,
    "/problems": problems_page,
    "/run/{run:number}/export.eval": eval_file,
    "/run/{run:number}/step/{step:number}": open_step,
    "/run/{run:number}/all": step_page,
    "/run/{run:number}/{key}": step_page,
    "/run/{run:number}/{key}/group": group_page,
    "/run/{run:number}/{key}/sample": sample_page,
    "/run/{run:number}/{key}/timeline": timeline_page,
    "/run/{run:number}/{key}/timeline.json": timeline_page,
}


def create_app(runs: Sequence[data.Run], port: int) -> Starlette:
    """Return the viewer of these runs; `port` is the one that browsers name in `Host`."""
    routes = [*(Route(path, show) for path, show in ROUTES.items()), Mount("/static", StaticFiles(directory=STATIC))]
    refused = (HTTPException, duckdb.OutOfMemoryException, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(refused, refuse))
    app.add_middleware(BaseHTTPMiddleware, dispatch=guard)
    app.state.runs, app.state.port = list(runs), port
    return app
