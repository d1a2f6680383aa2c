"""A Ray of this machine with the application of `sonoro.scale` on it, for as long as stdin is open.

`python ray_cluster.py FOLDER`: its answers are lines that begin with `answer`. The first is the address; then
`deploy builtin` (one replica of the built-in voice), `deploy sine` (two of a slow sine) and `deploy scaled` (one of
them, or two, as clients wait), in place of what there is, are answered by how many deployments there were, `replicas`
by how many are in which state.
"""

import socket
import sys

import ray
from ray import serve

from sonoro.scale import app

NAME = "speech"
DEPLOYED = {
    "builtin": {"min_replicas": 1, "max_replicas": 1},
    "sine": {"model": "slow_live", "factory": "sine_models:load", "min_replicas": 2, "max_replicas": 2},
    "scaled": {"model": "slow_live", "factory": "sine_models:load", "max_replicas": 2, "target_wait_ms": 40},
}


def arguments(name, voices_folder, generation):
    engine = {"slots": 4, "max_positions": 1200, "max_frames": 512, "segment_letters": 400}
    return {
        **DEPLOYED[name],
        "engine": {**engine, "voices_folder": voices_folder},
        # The number makes it another application, which takes the place of the one before.
        "server": {"max_queue_wait_ms": 500_000 + generation},
        "cpus": 0.1,
        "health_check_s": 1.0,
    }


def replicas():
    states = serve.status().applications[NAME].deployments["sonoro"].replica_states
    return ", ".join(f"{getattr(state, 'value', state)} {count}" for state, count in sorted(states.items()))


def main():
    folder, generation = sys.argv[1], 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(
        num_cpus=2,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        _temp_dir=folder,
        log_to_driver=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    print(f"answer http://127.0.0.1:{port}", flush=True)
    for line in sys.stdin:
        command, _, name = line.strip().partition(" ")
        if command == "deploy":
            generation += 1
            serve.run(app(arguments(name, f"{folder}/voices", generation)), name=NAME)
        print("answer", generation if command == "deploy" else replicas(), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
