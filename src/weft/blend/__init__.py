"""Order of offline requests: blends compute-heavy and memory-heavy ones, groups shared prefixes.

BlendServe: requests that stress arithmetic (long prompts) and requests that stress memory bandwidth
(long outputs) run side by side, so that each step can overlap the two, while prompts with a common
prefix still follow each other, so that the prefix is computed once. This package decides the order
in which requests are submitted and nothing else: it needs the engine's KV capacity and the
ends of requests, so it works with any engine:

    from weft.blend.density import Rates
    from weft.blend.order import Jobs, Room, make_order
    from weft.cost.hardware import hardware
    from weft.cost.shape import model_shape

    rates = Rates.of(model_shape("llama-3.1-8b"), hardware("a100"))
    room = Room(kv_tokens=420_000, requests=1024)
    order = make_order("blend", Jobs(prompts, longest), room, rates)
    while order.remaining or running:
        while (number := order.next()) is not None:
            submit(number)                      # prompts[number]
        number, output_tokens = wait_for_an_end()
        order.ended(number, output_tokens)      # None: it failed

``make_order("dfs", ..., lengths=LengthTable())`` keeps prefixes together, and starts no more than
the memory will hold. ``Jobs(..., done={number: output_tokens})`` resumes: those are not handed out
again, and their lengths tell about the others. ``order.progress(number, output_tokens)``, called
now and then for one request that runs, tells how many steps have passed: starts are then spread
evenly over time.

Steps, one module each: ``tree`` (prefix tree), ``lengths`` (output lengths, learnt from ends and
from what runs), ``density`` (compute over memory time), ``sort`` (children by falling density,
outliers moved to the root while 99 % of the sharing is kept), ``dual_scan`` (from both ends, memory
shared out so that each batch has the density of the whole), ``forecast`` (what will be held of the
memory), ``forecasting`` and ``blending`` (the orders), ``order`` (the front), ``partition`` (parts
of equal load for data parallel engines), ``windows`` (pools of requests under a deadline).
"""
