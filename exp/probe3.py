"For the next run on an H200: which form of the product is quickest, and the whole chain, beside cuBLAS, in an order drawn anew in every round."
import random, statistics, sys, time, warnings
warnings.simplefilter("ignore")
sys.path[:0] = ["tests", "tools", "."]
import torch
from fusedloss.core.hopper import Form, score_exponentials, score_statistics
from fusedloss import product
from fusedloss.chunks import Gradients
from fusedloss.core.options import LossOptions
from fusedloss.measure import SHAPES, Shape, relative_error

SHAPES_5 = dict(zip("ABCDE", (*SHAPES, Shape(4096, 2048, 151936), Shape(8192, 896, 151936))))
bf16 = torch.bfloat16


def data(s, dtype=bf16):
    g = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(n, s.H, generator=g, device="cuda").to(dtype) for n in (s.N, s.V))
    return x, (w.float() / s.H ** 0.5).to(dtype), torch.arange(s.N, device="cuda") * 37 % s.V


def timed(fns, rounds=7, target=0.03):
    "ms, medians, and the SM clock beside"
    reps = {}
    for k, f in fns.items():
        f(); torch.cuda.synchronize(); t = time.perf_counter(); f(); torch.cuda.synchronize()
        reps[k] = max(2, int(target / max(time.perf_counter() - t, 1e-5)))
    got, clocks = {k: [] for k in fns}, {k: [] for k in fns}
    for _ in range(rounds):
        order = list(fns); random.shuffle(order)
        for k in order:
            a, b = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            fns[k](); a.record()
            for _ in range(reps[k]): fns[k]()
            b.record()
            try: clocks[k].append(torch.cuda.clock_rate())
            except Exception: pass
            b.synchronize(); got[k].append(a.elapsed_time(b) / reps[k])
    return {k: (statistics.median(v), statistics.median(clocks[k]) if clocks[k] else 0) for k, v in got.items()}


FORMS = {"coop": Form(), "turn c2 g8": Form(5, in_turn=True), "turn c2 g16": Form(5, group=16, in_turn=True), "turn c2 g5": Form(5, group=5, in_turn=True),
         "turn c1 g8": Form(5, cluster=1, in_turn=True), "turn c2 s4": Form(4, in_turn=True)}


class Chain:
    def __init__(self, x, w, y, rows, form, wide=False):
        self.given, self.form, self.wide = (x, w, y, None, torch.tensor(float(len(x)), device="cuda"), LossOptions(), rows), form, wide
    def __call__(self):
        x, w = self.given[:2]
        grads = Gradients(x, w, (True, True, False), x.dtype, self.wide, 1.0)
        losses = product.run_exponentials(*self.given, grads, self.form)
        return losses, grads.dx, grads.rounded_dw()


def check():
    for s in (Shape(1000, 904, 5000), Shape(2048, 2048, 32768)):
        x, w, y = data(s)
        X, W = x.double().requires_grad_(), w.double().requires_grad_()
        truth = torch.nn.functional.cross_entropy(X @ W.T, y); truth.backward()
        xb, wb = x.clone().requires_grad_(), w.clone().requires_grad_()
        torch.nn.functional.cross_entropy(xb @ wb.T, y).backward()
        for name, how in FORMS.items():
            loss, dx, dw = Chain(x, w, y, s.N // 2 // 128 * 128, how)()
            print(s, name, f"loss {abs(loss.sum().item() - truth.item()):.1e} dx {relative_error(dx, X.grad):.2e} (eager {relative_error(xb.grad, X.grad):.2e}) dw {relative_error(dw, W.grad):.2e} (eager {relative_error(wb.grad, W.grad):.2e})", flush=True)


def bench(letters):
    for letter in letters:
        s = SHAPES_5[letter]; x, w, y = data(s)
        z, off = torch.empty(s.N, s.V, device="cuda", dtype=bf16), torch.zeros(s.N, device="cuda")
        fns = {"cuBLAS z": lambda: torch.mm(x, w.T, out=z)}
        for name, how in FORMS.items():
            tiles, tz = -(-s.V // how.classes), torch.empty(s.N, device="cuda")
            stats, sums = torch.empty(tiles, s.N, 2, device="cuda"), torch.empty(tiles, s.N, device="cuda")
            fns[f"stats {name}"] = lambda form=how, stats=stats, tz=tz: score_statistics(x, w, y, stats, tz, form=form)
            fns[f"exp {name}"] = lambda form=how, sums=sums, tz=tz: score_exponentials(x, w, y, off, z, sums, tz, form=form)
        t = timed(fns)
        for k, (ms, clock) in t.items(): print(f"{letter} {k}: {ms:.3f} ms, {ms / t['cuBLAS z'][0]:.3f} of cuBLAS, {clock:.0f} MHz", flush=True)
        best = min((v[0], k[4:]) for k, v in t.items() if k.startswith("exp"))[1]
        del fns; z.normal_().mul_(1e-3); dx, dw = torch.empty_like(x), torch.empty_like(w)
        def three(): torch.mm(x, w.T, out=z); torch.mm(z, w, out=dx); torch.mm(z.T, x, out=dw)
        fns = {"three": three}
        for name, budget in (("1 GiB", 2 ** 30), ("512 MiB", 2 ** 29)):
            chunks = -(-s.N * 2 * s.V // budget)
            rows = -(-s.N // chunks // 128) * 128
            rows = rows if rows * 2 * s.V <= budget else rows - 128
            fns[f"chain {name}, {rows} rows, {best}"] = Chain(x, w, y, rows, FORMS[best])
        t = timed(fns, 5)
        for k, (ms, clock) in t.items(): print(f"{letter} {k}: {ms:.3f} ms, {ms / t['three'][0]:.3f} of three, {clock:.0f} MHz", flush=True)
        del fns, z, dx, dw; torch.cuda.empty_cache()


check() if sys.argv[1] == "check" else bench(sys.argv[2])
