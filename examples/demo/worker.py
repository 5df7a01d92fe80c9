"""One process of the demo: `python -m examples.demo.worker JOB`, with the job as JSON.

{"role": "train", "url": …, "name": "w0", "worker": 0, "workers": 2, "epochs": 10, "seed": 1}
{"role": "evaluate", "url": …, "name": "evaluator", "seed": 1}     each word "evaluate" gives an event
{"role": "reference", "epochs": 10, "seed": 1}                     the same model without servers
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

import elasticps as eps
from elasticps.torch import Optimizer
from examples.demo import data
from examples.demo.model import evaluate
from examples.demo.processes import Pipe
from examples.demo.training import Plan, local, remote, train


def _train(job: dict[str, Any], pipe: Pipe, training: data.Ratings) -> None:
    with eps.connect(job["url"], worker=job["name"]) as ps:
        begin = ps.resume()
        what = remote(ps, training, job["seed"])
        pipe.tell("ready", steps=begin.steps, clock=begin.clock)
        pipe.next_word()
        plan = Plan(job["epochs"], job["seed"], job["worker"], job["workers"], skip=begin.steps)

        def after(epoch: int) -> None:
            ps.flush()
            pipe.tell("epoch", epoch=epoch, clock=ps.clock)

        train(what, training, plan, pipe.tell, after)
        pipe.tell("done")


def _evaluate(job: dict[str, Any], pipe: Pipe, training: data.Ratings, test: data.Ratings) -> None:
    with eps.connect(job["url"], worker=job["name"]) as ps:
        what = remote(ps, training, job["seed"], overlap=False)
        (optimizer,) = what.optimizers
        assert isinstance(optimizer, Optimizer)
        pipe.tell("ready")
        while pipe.next_word() == "evaluate":
            optimizer.refresh()
            auc, loss = evaluate(what.model, test)
            pipe.tell("evaluated", auc=auc, loss=loss)
        pipe.tell("done")


def _reference(job: dict[str, Any], pipe: Pipe, training: data.Ratings, test: data.Ratings) -> None:
    what = local(training, job["seed"])
    pipe.tell("ready")
    pipe.next_word()

    def after(epoch: int) -> None:
        began = time.monotonic()
        auc, loss = evaluate(what.model, test)
        pipe.tell("epoch", epoch=epoch, auc=auc, loss=loss, evaluating_s=time.monotonic() - began)

    train(what, training, Plan(job["epochs"], job["seed"]), pipe.tell, after)
    pipe.tell("done")


def main() -> None:
    """Does the job that the command line describes."""
    torch.set_num_threads(1)  # several processes share the cores
    job = json.loads(sys.argv[1])
    pipe = Pipe()
    training, test = data.split(data.load(data.find()), job["seed"])
    if job["role"] == "train":
        _train(job, pipe, training)
    elif job["role"] == "evaluate":
        _evaluate(job, pipe, training, test)
    else:
        _reference(job, pipe, training, test)


if __name__ == "__main__":
    main()
