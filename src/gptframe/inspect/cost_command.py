"""`gptframe cost`: from a config to its price."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from gptframe.config import Config
from gptframe.errors import UserError
from gptframe.inspect import cost, cost_report
from gptframe.inspect.commands import print_json
from gptframe.inspect.machine import available_memory
from gptframe.inspect.show import size
from gptframe.inspect.source import Source, with_vocabulary


def run(config: Config, directory: Path | None, arguments: argparse.Namespace) -> int:
    """Work it out, measure if asked to, and print it."""
    found = cost.plan(with_vocabulary(Source(config, directory)))
    if arguments.throughput is not None:
        found = replace(found, throughput=arguments.throughput, throughput_from="as given")
    if arguments.measure:
        free = available_memory()
        if found.assumed:
            raise UserError("--measure: there is no GPU here to measure; give --throughput N")
        if found.device.accelerator == "cpu" and free is not None and found.memory.peak > free:
            raise UserError(f"--measure needs {size(found.memory.peak)} and {size(free)} are available")
        rate = cost.measured_throughput(found.config, found.device) * found.world
        note = "measured here" + (f", times {found.world} devices" if found.world > 1 else "")
        found = replace(found, throughput=rate, throughput_from=note + ", without data loading, validation and logging")
    if arguments.json:
        print_json(cost_report.to_dict(found))
    else:
        cost_report.report(found)
    return 0
