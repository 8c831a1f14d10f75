"""A sink of your own: the rows as one long CSV file, each number on a line. See README.md beside this."""

import csv
import os
from pathlib import Path

COLUMNS = ("row", "run", "axis", "step", "attempt", "key", "value")


class CsvRows:
    """Appends to the file that CSV_ROWS names, or to rows.csv."""

    def init(self, run, config):
        """Open the file, take off the last row, and say which one is now the last: those after it are sent again."""
        path = Path(os.environ.get("CSV_ROWS", "rows.csv"))
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        last_row = 0
        if len(lines) > 1:  # of the last row, some lines may be missing: it comes again, whole
            begun = lines[-1].split(",")[0] if lines[-1].endswith("\n") else lines[-2].split(",")[0]
            lines = [line for line in lines if line.split(",")[0] != begun and line.endswith("\n")]
            last_row = int(lines[-1].split(",")[0]) if len(lines) > 1 else 0
        path.write_text("".join(lines))
        self._file = path.open("a", newline="")
        self._lines = csv.writer(self._file, lineterminator="\n")
        if not lines:
            self._lines.writerow(COLUMNS)
        return last_row

    def write(self, rows):
        """Called with up to 256 rows, in order."""
        for row in rows:
            place = [row["row"], row["run"], row["axis"], row["step"], row["attempt"]]
            self._lines.writerows([*place, key, value] for key, value in row["values"].items())

    def flush(self):
        """Called after each write: what returned from here is not sent again."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self):
        self._file.close()
