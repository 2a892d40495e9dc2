"""Sources of each request's prompt tokens: vLLM's own prefix cache, a load, or the model.

As vLLM counts `vllm:prompt_tokens`: a prompt counts once, when its first output is there, as the request was placed before any
preemption. A streaming session counts with its first prompt. Tokens that another connector loaded count as computed. Unlike
vLLM's, tokens of a load that failed count as computed: they were.

Owns: a few numbers per request, from vLLM's first query for it to its end. Refuses to know: lookups, blocks, the daemon.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvserver.adapters.common.notices import Prompt

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Account:
    prompt: Prompt = field(default_factory=Prompt)
    asked: int | None = None  # local tokens in vLLM's query, until vLLM places the request
    loading: tuple[int, int] | None = (
        None  # tokens of the prompt that the load under way brings, if it ends well; and from L2
    )


class Sources:
    """Accounts of all requests, also of those that run without cache."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

    def asked(self, request_id: str, local_tokens: int) -> None:
        """vLLM tries to place the request, and has `local_tokens` of it itself."""
        self._accounts.setdefault(request_id, _Account()).asked = local_tokens

    def placed(self, request: Request, external_tokens: int, from_l2: int) -> None:
        """Note that vLLM placed the request.

        With external tokens a load begins, `from_l2` of them from L2. vLLM places the request again when the load has ended.
        """
        account = self._accounts.get(request.request_id)
        if account is None:
            return
        prompt = account.prompt
        if account.loading is not None:
            prompt.loads += 1
            prompt.loaded_tokens += account.loading[0]
            prompt.l2_tokens += account.loading[1]
            account.loading = None
        brings = 0
        if account.asked is not None and request.num_preemptions <= 0:
            prompt.prompt_tokens = request.num_prompt_tokens
            prompt.local_tokens = min(account.asked, prompt.prompt_tokens)
            prompt.loaded_tokens = prompt.l2_tokens = 0
            brings = min(external_tokens, prompt.prompt_tokens - prompt.local_tokens)
        account.asked = None
        if external_tokens > 0:
            account.loading = brings, min(from_l2, brings)

    def load_failed(self, request_id: str) -> None:
        """The load failed on one rank; other ranks may report the same later."""
        account = self._accounts.get(request_id)
        if account is not None and account.loading is not None:
            account.prompt.loads += 1
            account.prompt.failed_loads += 1
            account.loading = None

    def ended(self, request: Request) -> Prompt:
        """vLLM counts the prefill with the first output; before 0.28 only after it ended the request."""
        found = self._accounts.pop(request.request_id, _Account()).prompt
        if request.num_output_tokens > 0 or request.prefill_stats is None:
            return found
        return replace(found, prompt_tokens=0, local_tokens=0, loaded_tokens=0, l2_tokens=0)
