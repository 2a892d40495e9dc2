"""Settings, the sources of their values, and the choices that follow: L1's size and placement, socket files, and logs."""

from kvserver.config.capacity import HUGE_PAGE_BYTES, available_memory, bytes_beside_l1, memory_limit
from kvserver.config.http_token import bearer, read_token
from kvserver.config.logs import log_refused_start, set_up_logging
from kvserver.config.memory_files import FDSTORE, file_system_of, huge_pages_at, l1_state_path
from kvserver.config.names import flag, misspelt_variables, unknown_flags, variable
from kvserver.config.otlp import OtlpEndpoint, parse_otlp_endpoint
from kvserver.config.placement import Placement, choose_l1, gpu_cpus, gpu_node, interleaved_nodes
from kvserver.config.settings import (
    SERVING_MODES,
    GiB,
    MiB,
    Settings,
    parse_events_endpoint,
    parse_gpus,
    parse_size,
)
from kvserver.config.shares import parse_shares
from kvserver.config.socket_files import SocketFile
from kvserver.config.sources import (
    Configuration,
    add_flags,
    chosen_log_format,
    field_types,
    read_configuration,
)
from kvserver.config.stderr import LOG_FD, library_lines_logged
from kvserver.config.tiers import TierUrl, parse_tiers
from kvserver.config.urls import forms_of, passwords_in, split_url, without_user
