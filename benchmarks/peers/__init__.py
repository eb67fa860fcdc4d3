"""reblock and its peers: the same weights, threads and precision behind one small protocol.

models          the models, once for all
openvino_model  the same as OpenVINO's graph
artifacts       what is compiled or converted before anything is measured, and kept
serving         requests, and the times and tokens that come of them
engines         which engine is in which module, and what each is
worker          the process that runs one engine
processes       starts workers and asks them
measure         the measurements, round by round
sections        what is made of them
report          the report, as markdown
plot            the picture
"""

import sys

# OpenVINO tells its makers over the network that it is used, where it can import this package.
sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
