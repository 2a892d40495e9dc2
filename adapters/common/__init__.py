"""What the adapter of any engine needs; knows no engine.

`link` keeps the connection to the daemon in a thread of its own. A scheduler sends through `dispatcher`, which passes
on the replies: `lookups`, the `notices` of its pool and its requests (with the `speed` of prefill), the `introduction` of
the engine, and the `announcer` of the daemon's tiers (`announced` blocks are not announced twice). `planes` and `memory`
turn tensors into planes and registered memory, which `host_memory` or `cuda_memory` (with `cuda_driver`) hand over by the
contract in `exporter`; `weights` are digests of a model's files.

`specs` describe one load and one store, and `steps` what the halves send each other. The `worker` half begins the copies:
`send_queue` sends their messages once the engine's own work on the blocks is done, `copies` is the state word of a copy in
flight, and `endings` what follows from it. `hazards` are blocks that a copy still reads or may write, `faults` exceptions
that are kept from the engine, `stats` what the halves report, and `settings` what an operator may set.

In the engine's front end: `cache_status` is whether an engine has its cache, and why not; `watch` queries the daemon for
it, `board` shows it as gauges, and `engine_stats` sends the engine's stats to the daemon.
"""
