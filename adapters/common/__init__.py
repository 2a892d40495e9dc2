"""Parts that the adapter of any engine needs; knows no engine.

Connection and scheduler:
- `link` keeps the connection to the daemon in a thread of its own.
- `dispatcher` sends the scheduler's messages and passes each reply on.
- `lookups` sends lookups and collects their answers.
- `notices` report what the block pool did and which requests ended; `speed` measures prefill for them.
- `introduction` describes the engine to the daemon.
- `announcer` publishes the blocks of the daemon's tiers; `announced` keeps it from publishing a block twice.

Memory:
- `planes` and `memory` turn tensors into planes and registered memory.
- `host_memory` and `cuda_memory` (by `cuda_driver`) hand that memory over, by the contract in `exporter`.
- `weights` digests a model's files.

Copies:
- `specs` describe one load and one store; `steps` are the records that scheduler and worker exchange.
- `worker` begins the copies; `send_queue` sends their messages once the engine's own work on the blocks is done.
- `copies` is the state word of a copy in flight; `endings` decides what follows from it.
- `hazards` are blocks that a copy still reads or may write; `faults` are exceptions kept from the engine.
- `stats` are the reports of both halves, `settings` the options of an operator.

The engine's front end:
- `cache_status` is whether an engine has its cache, and why not; `board` shows it as gauges.
- `watch` queries the daemon for it; `engine_stats` sends the engine's stats to the daemon.
"""
