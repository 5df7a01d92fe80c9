"""Which part of a cluster a task has, and when a job is over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.launch.core.job_end import DONE, LEFT, RUNNING, JobEnd, staying
from elasticps.launch.core.task import Task, in_slurm, of_nodes, of_slurm

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[01-03]",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}


def test_a_task_knows_its_part_by_the_variables_of_srun() -> None:
    assert in_slurm(SRUN)
    task = of_slurm(SRUN)
    assert task == Task("slurm-4711.2", ("node01", "node02", "node03"), 1, 3, 6, 1, task.port)
    assert not task.first
    assert of_slurm({**SRUN, "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"}).first


def test_all_tasks_of_a_run_derive_one_name_and_port_and_other_runs_others() -> None:
    one = of_slurm({**SRUN, "SLURM_PROCID": "5", "SLURM_NODEID": "2"})
    assert (one.name, one.port) == (of_slurm(SRUN).name, of_slurm(SRUN).port)
    others = [
        of_slurm({**SRUN, key: value})
        for key, value in (("SLURM_JOB_ID", "4712"), ("SLURM_STEP_ID", "3"), ("SLURM_RESTART_COUNT", "1"))
    ]
    assert len({(task.name, task.port) for task in (one, *others)}) == 4
    assert all(20_000 <= task.port < 32_000 for task in (one, *others))


def test_tasks_of_one_machine_stay_on_loopback() -> None:
    task = of_slurm({**SRUN, "SLURM_STEP_NODELIST": "node01", "SLURM_NODEID": "0"}, head="10.0.0.1")
    assert task.nodes == ("127.0.0.1",)
    assert of_slurm(SRUN, head="10.0.0.1").nodes == ("10.0.0.1", "node02", "node03")


def test_a_batch_script_alone_is_no_task_of_a_step() -> None:
    assert not in_slurm({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": "six"}, "SLURM_PROCID is 'six', and no number"),
        ({"SLURM_PROCID": "6"}, "no task 6 of 6"),
        ({"SLURM_NODEID": "3"}, "no machine 3: 3 are listed"),
        ({"SLURM_STEP_NODELIST": "node[1-"}, "brackets do not fit"),
        ({"SLURM_STEP_NODELIST": "a b"}, "no list of machines"),
        ({"SLURM_PROCID": "0"}, "--distribution=block"),
    ],
)
def test_variables_that_make_no_sense_are_named(change: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of_slurm({**SRUN, **change})


def test_a_missing_variable_is_named() -> None:
    with pytest.raises(ValueError, match="SLURM_JOB_ID is missing"):
        of_slurm({key: value for key, value in SRUN.items() if key != "SLURM_JOB_ID"})


def test_machines_listed_by_hand_have_a_task_each() -> None:
    task = of_nodes("launch", "10.0.0.[1-3]", 2, 23790)
    assert task == Task("launch", ("10.0.0.1", "10.0.0.2", "10.0.0.3"), 2, 2, 3, port=23790)
    assert of_nodes("launch", "node07", 0, 23790).nodes == ("127.0.0.1",)
    with pytest.raises(ValueError, match="twice"):
        of_nodes("launch", "a,a", 0, 23790)
    with pytest.raises(ValueError, match="no machine 3"):
        of_nodes("launch", "a,b,c", 3, 23790)


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 3))
def test_every_server_belongs_to_one_task_and_machines_have_about_as_many(
    nodes: int, servers: int, tasks_each: int
) -> None:
    names = tuple(f"n{i}" for i in range(nodes))
    tasks = [
        Task("job", names, node, node * tasks_each + local, nodes * tasks_each, local)
        for node in range(nodes)
        for local in range(tasks_each)
    ]
    dealt = [task.servers(servers) for task in tasks]
    assert sorted(name for each in dealt for name in each) == sorted(f"s{i}" for i in range(servers))
    counts = [len(each) for task, each in zip(tasks, dealt, strict=True) if task.local == 0]
    assert max(counts) - min(counts) <= 1
    assert tasks[0].first


# ------------------------------------------------------------------------------------------------- the end of a job


def test_a_job_is_over_when_all_tasks_have_done_their_work() -> None:
    end = JobEnd(3, patience_s=60)
    assert end.waits_for({0: DONE, 1: RUNNING, 2: RUNNING}, 0) == [1, 2]
    assert end.waits_for({0: DONE, 1: DONE, 2: RUNNING}, 500) == [2]
    assert end.waits_for({0: DONE, 1: LEFT, 2: DONE}, 501) == []


def test_a_task_that_has_died_is_waited_for_until_it_is_started_again_or_patience_ends() -> None:
    end = JobEnd(2, patience_s=60)
    assert end.waits_for({0: DONE}, 10) == [1]
    assert end.waits_for({0: DONE}, 69) == [1]
    assert end.waits_for({0: DONE, 1: RUNNING}, 70) == [1]  # it is back
    assert end.waits_for({0: DONE}, 100) == [1]  # and has died again
    assert end.waits_for({0: DONE}, 159) == [1]
    assert end.waits_for({0: DONE}, 160) == []


def test_without_an_answer_of_etcd_others_count_as_they_did_and_are_waited_for_ten_times_as_long() -> None:
    end = JobEnd(3, patience_s=60)
    assert end.waits_for({0: DONE, 1: RUNNING}, 0) == [1, 2]
    assert end.waits_for(None, 10) == [1, 2]
    assert end.waits_for(None, 609) == [1, 2]
    assert end.waits_for({0: DONE, 1: DONE}, 609) == [2]  # which could not say meanwhile that it is there
    assert end.waits_for({0: DONE, 1: DONE}, 669) == []
    assert end.waits_for(None, 700) == [2]
    gave_up = [end.gave_up]
    assert end.waits_for(None, 1300) == []
    assert [*gave_up, end.gave_up] == [False, True]
    hasty = JobEnd(2, patience_s=0)
    assert hasty.waits_for(None, 0) == hasty.waits_for(None, 59) == [0, 1]
    assert hasty.waits_for(None, 60) == []


def test_the_first_task_stays_as_long_as_others_need_etcd() -> None:
    assert staying({0: DONE, 1: LEFT, 2: DONE, 3: RUNNING}) == [2, 3]
    assert staying({0: DONE, 1: LEFT}) == []
