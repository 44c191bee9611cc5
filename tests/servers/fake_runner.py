"""A model runner as the plugin sees one: it is given steps, and holds what vLLM's holds after them."""

from types import SimpleNamespace

import torch


class Runner:
    """Runs steps of known states. A step is [(request, position, count)]; requests are prefilled, decoded, mixed, preempted at will."""

    def __init__(self, layers, hidden, dtype=torch.float32, tokens=64, requests=8):
        self.layers, self.hidden, self.dtype, self.device = layers, hidden, dtype, torch.device("cpu")
        self.max_num_tokens, self.max_num_reqs = tokens, requests
        self.model_config = SimpleNamespace(get_hidden_size=lambda: hidden, runner_type="generate")
        parallel = SimpleNamespace(
            pipeline_parallel_size=1, prefill_context_parallel_size=1, enable_dbo=False
        )
        cache = SimpleNamespace(enable_prefix_caching=False, kv_sharing_fast_prefill=False)
        self.vllm_config = SimpleNamespace(
            parallel_config=parallel,
            cache_config=cache,
            speculative_config=None,
            model_config=self.model_config,
        )
        self.input_ids = torch.zeros(tokens, dtype=torch.int32)
        self.requests, self.states, self.execute_model_state = {}, {}, None
        self.input_batch = SimpleNamespace(req_ids=[])

    def add(self, request, ids, aux, last, top1, vocab, row=None):
        """ids [T], aux [T, L, D], last [T, D], top1 [T]; row: the name under which it is kept, or None."""
        extra = {"eyas_row": row} if row else None
        self.requests[request] = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra))
        self.states[request] = (torch.tensor(ids, dtype=torch.int32), aux, last, top1, vocab)

    def scheduled(self, step):
        """What vLLM's scheduler would say of a step; a request at position 0 is new."""
        old = [(r, p) for r, p, _ in step if p]
        return SimpleNamespace(
            total_num_scheduled_tokens=sum(n for _, _, n in step),
            num_scheduled_tokens={r: n for r, _, n in step},
            scheduled_new_reqs=[
                SimpleNamespace(req_id=r, num_computed_tokens=0) for r, p, _ in step if p == 0
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[r for r, _ in old], num_computed_tokens=[p for _, p in old]
            ),
        )

    def execute_model(self, scheduled):
        """Leaves aux states, logits and ids as a step does, padded, in buffers that the next step writes over."""
        begun = {n.req_id: 0 for n in scheduled.scheduled_new_reqs}
        begun |= dict(
            zip(
                scheduled.scheduled_cached_reqs.req_ids,
                scheduled.scheduled_cached_reqs.num_computed_tokens,
                strict=True,
            )
        )
        self.input_batch.req_ids = list(scheduled.num_scheduled_tokens)
        buffers = [torch.full((self.max_num_tokens, self.hidden), 9.0, dtype=self.dtype) for _ in self.layers]
        vocab = max(s[4] for s in self.states.values())
        logits, at = torch.zeros(len(begun), vocab), 0
        for i, (request, n) in enumerate(scheduled.num_scheduled_tokens.items()):
            ids, aux, last, top1, _ = self.states[request]
            here, there = slice(at, at + n), slice(begun[request], begun[request] + n)
            self.input_ids[here] = ids[there]
            for j in range(len(self.layers) - 1):
                buffers[j][here] = aux[there, j].to(self.dtype)
            buffers[-1][here] = last[there].to(self.dtype)
            logits[i, top1[begun[request] + n - 1]] = 1.0
            at += n
        self.execute_model_state = SimpleNamespace(aux_hidden_states=buffers, logits=logits)
        return None
