"""Runs a command, shows its output and keeps it in a file with the machine, commit and date.

    record.py FILE COMMAND [ARGUMENT ...]

Exits as the command does.
"""

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path


def header(command: list[str]) -> str:
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = f"{os.cpu_count()} cores, {memory_bytes >> 30} GiB, {platform.machine()}"
    return (
        f"command: {' '.join(command)}\ncommit:  {commit or 'unknown'}\n"
        f"machine: {machine}, Python {platform.python_version()}\n"
        f"date:    {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC\n\n"
    )


def main(target: str, command: list[str]) -> int:
    about = header(command)  # before the file that is there differs from the committed one
    with Path(target).open("w") as file:
        file.write(about)
        file.flush()
        running = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for line in running.stdout:
            print(line, end="", flush=True)
            file.write(line)
    return running.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
