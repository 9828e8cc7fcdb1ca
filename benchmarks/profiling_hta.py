"""HolisticTraceAnalysis on a folder of training traces: its shares and its time, as JSON.

Run by ``profiling_compare.py`` with the Python of an environment that has HolisticTraceAnalysis; it is in no lock of
ours, as it pulls jupyterlab and plotly.
"""

import json
import logging
import sys
import time
import warnings


def main(folder: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    from hta.trace_analysis import TraceAnalysis

    began = time.perf_counter()
    analysis = TraceAnalysis(trace_dir=folder)
    shares = analysis.get_temporal_breakdown(visualize=False)
    overlap = analysis.get_comm_comp_overlap(visualize=False)
    seconds = time.perf_counter() - began
    ranks = {}
    for row, other in zip(shares.to_dict("records"), overlap.to_dict("records"), strict=True):
        ranks[str(int(row["rank"]))] = {
            "compute": row["compute_time_pctg"],
            "other": row["non_compute_time_pctg"],
            "idle": row["idle_time_pctg"],
            "overlap": other["comp_comm_overlap_pctg"],
            "span_us": float(row["kernel_time(us)"]),
        }
    json.dump({"seconds": seconds, "ranks": ranks}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
