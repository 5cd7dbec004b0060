"""In: what codescent sends to a function of log.to. Out: tables runs, metrics and events in a SQLite file.
Needs Python alone. Call `PYTHONPATH=examples codescent train default log.to=log_to_sqlite:log`."""

import json
import os
import sqlite3
from typing import Any

TABLES = """
CREATE TABLE IF NOT EXISTS runs (id INTEGER PRIMARY KEY, name TEXT, folder TEXT, first_step INTEGER, config TEXT,
                                 problem TEXT DEFAULT 'still running');
CREATE TABLE IF NOT EXISTS metrics (run INTEGER, step INTEGER, name TEXT, value REAL);
CREATE TABLE IF NOT EXISTS events (run INTEGER, kind TEXT, wall_time TEXT, event TEXT);
"""


class SqliteLogger:
    """Writes one run. Each call is one transaction, so that other programs can read the file at any time."""

    def __call__(self, kind: str, data: dict[str, Any]) -> None:
        """What codescent calls: at the start, for each row of metrics and each event, and at the end."""
        if kind == "start":
            self.file = sqlite3.connect(os.environ.get("METRICS_DB", "metrics.sqlite"), timeout=5)
            self.file.executescript(TABLES)
            columns = (data["name"], data["folder"], data["first_step"], json.dumps(data["config"]))
            insert = "INSERT INTO runs (name, folder, first_step, config) VALUES (?, ?, ?, ?)"
            self.run = self.file.execute(insert, columns).lastrowid
        elif kind == "metrics":
            step = data.pop("step")
            rows = [(self.run, step, name, value) for name, value in data.items() if value is not None]
            self.file.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?)", rows)
        elif kind == "event":
            columns = (self.run, data["kind"], data["wall_time"], json.dumps(data))
            self.file.execute("INSERT INTO events VALUES (?, ?, ?, ?)", columns)
        elif kind == "end":
            self.file.execute("UPDATE runs SET problem = ? WHERE id = ?", (data["problem"], self.run))
        self.file.commit()


log = SqliteLogger()
