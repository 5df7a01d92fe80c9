"""A service that ranks items for a basket, by the model as it is at this moment: a reader in its process has the rows.

ELASTICPS_URL=etcd://… uvicorn examples.serving.service:app --port 8000
curl 'http://127.0.0.1:8000/rank?basket=17,4,256&n=3'
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import elasticps as eps

CANDIDATES = np.arange(1000)
MAX_AGE_S = 60.0
WEIGHT, BIAS = "model.1.weight", "model.1.bias"


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Reads the model before the first request is answered, and follows it from then on."""
    with eps.reader(tables=["items", WEIGHT, BIAS], every=0.005) as reader:
        app.state.reader = reader
        yield


async def rank(request: Request) -> JSONResponse:
    """The items that a basket would be liked best with. A pull reads local memory: no thread is needed for it."""
    reader = request.app.state.reader
    try:
        basket = np.array([int(item) for item in request.query_params["basket"].split(",")], np.int64)
        n = min(max(int(request.query_params.get("n", "10")), 1), len(CANDIDATES))
    except (KeyError, ValueError, OverflowError):
        return JSONResponse({"error": "basket=1,2,3 names items, n= says how many to rank"}, 400)
    age_s = _age_s(reader)
    rows = reader.pull({"items": np.concatenate([basket, CANDIDATES]), WEIGHT: None, BIAS: None})
    items = rows["items"]
    scores = (items[: len(basket)].sum(axis=0) + items[len(basket) :]) @ rows[WEIGHT][0] + rows[BIAS][0]
    best = np.argsort(-scores)[:n]
    steps = max(reader.as_of.steps.values(), default=0)
    found = [{"item": int(CANDIDATES[i]), "score": float(scores[i])} for i in best]
    return JSONResponse({"items": found, "age_s": age_s, "step": steps})


async def ready(request: Request) -> JSONResponse:
    """Whether what would be served is new enough."""
    age_s = _age_s(request.app.state.reader)
    return JSONResponse({"age_s": age_s}, 200 if age_s is not None and age_s <= MAX_AGE_S else 503)


def _age_s(reader: eps.Reader) -> float | None:
    """How old the oldest rows are; None where no server has said it yet."""
    age_s = reader.age
    return age_s if math.isfinite(age_s) else None


app = Starlette(routes=[Route("/rank", rank), Route("/readyz", ready)], lifespan=lifespan)
