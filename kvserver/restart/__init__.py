"""L1 over a restart: its file, the state that describes its chunks, and their adoption by the next daemon."""

from kvserver.restart.adoption import Adoption
from kvserver.restart.kept_l1 import KeptL1, NoKeptL1, RestartableL1
from kvserver.restart.l1_file import L1File
from kvserver.restart.stored_file import StoredL1File, drop_stored_l1
