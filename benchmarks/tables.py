"""Fills the tables of RESULTS.md from the result files.

    python benchmarks/tables.py            write them
    python benchmarks/tables.py --check    fail if RESULTS.md differs from what the files say

A table stands between `<!-- table: NAME -->` and `<!-- end -->` and begins with the command,
revision and machine of the file that it comes from. `make lint` runs the check.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

from tables_of_clients import clients, clients_on_server
from tables_of_cpu import (
    engine_floors,
    engine_ratios,
    engines,
    linkbench,
    shaped_link,
    speculation,
    split_on_cpu,
    structured,
)
from tables_of_doctor import doctor
from tables_of_gpus import handoff, peers, role_names, served, tensor_parallel
from tables_of_roles import roles, roles_paces, roles_served
from tables_of_router import fuzz, overload, placement, router, router_vs_peers
from tables_of_shapes import fp8_steps, gpu_start, shape_load, shapes
from tables_of_simulator import (
    open_loop_errors,
    open_loops,
    plan_regret,
    planned_rates,
    published_shapes,
    simulated_again,
    simulator,
    simulator_accuracy,
    simulator_accuracy_cpu,
)
from tables_of_steps import busy, dispatch, fallback, mixed_steps, revisions, sampled, steps

PAGE = Path(__file__).resolve().parent / "RESULTS.md"
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.S)

TABLES: dict[str, Callable[[], str]] = {
    "engines": engines("engine_vs_peers"),
    "engine-ratios": engine_ratios("engine_vs_peers"),
    "engines-avx2": engines("engine_vs_peers_avx2"),
    "engine-ratios-avx2": engine_ratios("engine_vs_peers_avx2"),
    "engine-floors-avx2": engine_floors("engine_vs_peers_avx2"),
    "engines-amx": engines("engine_vs_peers_amx"),
    "engine-ratios-amx": engine_ratios("engine_vs_peers_amx"),
    "split-on-cpu": split_on_cpu,
    "structured-output": structured,
    "router": router,
    "placement": placement,
    "doctor": doctor("doctor"),
    "doctor-vllm": doctor("doctor_vllm"),
    "simulator": simulator,
    "simulator-accuracy": simulator_accuracy,
    "simulator-accuracy-cpu": simulator_accuracy_cpu,
    "open-loops": open_loops(
        "open_loop_2xh200_chat",
        "open_loop_2xh200_w1",
        "plan_regret_2xh200_w1",
        "plan_regret_2xh200_answers",
        "plan_regret_2xh200_chat",
        "open_loop_2xh100",
    ),
    "open-loops-one-gpu": open_loops("open_loop_1xh200"),
    "simulated-again": simulated_again,
    "open-loop-errors-chat-now": open_loop_errors("open_loop_2xh200_chat"),
    "open-loop-errors-w1-now": open_loop_errors("open_loop_2xh200_w1"),
    "open-loop-errors-w1": open_loop_errors("plan_regret_2xh200_w1"),
    "open-loop-errors-answers": open_loop_errors("plan_regret_2xh200_answers"),
    "open-loop-errors-w2": open_loop_errors("plan_regret_2xh100_w2"),
    "open-loop-errors": open_loop_errors("plan_regret_2xh200_chat"),
    "published-shapes": published_shapes,
    "planned-rates": planned_rates,
    "plan-regret": plan_regret("plan_regret"),
    "plan-regret-cpu-w1-w2": plan_regret("plan_regret_cpu_w1_w2"),
    "plan-regret-gpus": plan_regret("plan_regret_gpus"),
    "plan-regret-chat": plan_regret("plan_regret_2xh200_chat"),
    "plan-regret-chat-now": plan_regret("open_loop_2xh200_chat"),
    "plan-regret-w2-h100": plan_regret("plan_regret_2xh100_w2"),
    "plan-regret-w1": plan_regret("plan_regret_2xh200_w1"),
    "plan-regret-answers": plan_regret("plan_regret_2xh200_answers"),
    "roles-follow": roles,
    "roles-paces": roles_paces,
    "roles-served": roles_served("roles_follow_served"),
    "roles-served-gpus": roles_served("roles_follow_served_2xh100"),
    "roles-served-gpus10": roles_served("roles_follow_served_2xh100_10ms"),
    "roles-served-chat": roles_served("roles_follow_served_2xh200_chat"),
    "roles-served-chat10": roles_served("roles_follow_served_2xh200_chat10"),
    "roles-served-8ms": roles_served("roles_follow_served_2xh200_8ms"),
    "roles-served-8ms-others": roles_served("roles_follow_served_2xh200_8ms_others"),
    "roles-served-8ms-36s": roles_served("roles_follow_served_2xh200_8ms_36s"),
    "overload": overload,
    "fuzz": fuzz,
    "router_vs_peers": router_vs_peers("router_vs_peers"),
    "router_vs_peers-zen5": router_vs_peers("router_vs_peers_zen5"),
    "clients": clients,
    "clients-on-server": clients_on_server,
    "speculation": speculation,
    "served": served("serve_split_strict", "serve_two_mixed", "serve_w1_w2"),
    "w1-turns": served(
        "w1_turns_2mixed_80757c0_1",
        "w1_turns_2mixed_33deb0c_1",
        "w1_turns_2mixed_ea6448a_1",
        "w1_turns_2mixed_80757c0_2",
        "w1_turns_2mixed_33deb0c_2",
        "w1_turns_1p1d_ea6448a_1",
        "w1_turns_1p1d_33deb0c_1",
        "w1_turns_1p1d_ea6448a_2",
        "w1_turns_1p1d_33deb0c_2",
    ),
    "role-names": role_names,
    "served-h100": served("serve_roles_h100", "serve_roles_h100_w2"),
    "peers": peers,
    "steps": steps,
    "revisions": revisions("gpu_revisions"),
    "revisions-ahead": revisions("gpu_revisions_ahead_h100"),
    "revisions-ahead-h200": revisions("gpu_revisions_ahead_h200"),
    "revisions-ahead-h200-16": revisions("gpu_revisions_ahead_h200_16"),
    "revisions-merge-h200": revisions("gpu_revisions_merge_h200"),
    "revisions-scalars-h200": revisions("gpu_revisions_scalars_h200"),
    "revisions-scalars-llama": revisions("gpu_revisions_scalars_h200_llama-3-8b"),
    "revisions-fp8": revisions("gpu_revisions_fp8_h200"),
    "revisions-h100": revisions("gpu_revisions_h100"),
    "sampled": sampled,
    "dispatch": dispatch,
    "tensor-parallel": tensor_parallel,
    "fallback": fallback,
    "busy": busy,
    "mixed-steps": mixed_steps,
    "handoff": handoff("handoff_nvlink"),
    "handoff-digests": handoff("handoff_nvlink_digests"),
    "linkbench": linkbench,
    "shaped-link": shaped_link,
    "shapes": shapes,
    "shape-load": lambda: shape_load("llama-3-8b"),
    "expert-load": lambda: shape_load("qwen3-30b-a3b"),
    "fp8": fp8_steps,
    "gpu-start": gpu_start("start_gpu"),
    "gpu-start-no-bytecode": gpu_start("start_gpu_no_bytecode"),
    "gpu-start-h100": gpu_start("start_gpu_h100"),
}


def filled(page: str) -> str:
    """The page with all its tables made anew.

    Raises:
        KeyError: It has a mark that no table belongs to.
    """
    return _MARKED.sub(lambda mark: f"{mark[1]}{TABLES[mark[2]]()}\n{mark[3]}", page)


def main() -> int:
    """Fill or check RESULTS.md."""
    page = PAGE.read_text()
    made = filled(page)
    if "--check" not in sys.argv:
        PAGE.write_text(made)
    elif made != page:
        print("benchmarks/RESULTS.md differs from the files: run benchmarks/tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
