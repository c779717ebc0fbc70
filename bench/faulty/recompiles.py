"""torch.compile meets a new length every six steps. Mended: padded to one length."""

import torch
from common import IS_FIXED, Loop

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 1_000
    width = 256
    layers = [torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)]
    plain = torch.nn.Sequential(*layers)
    model = torch.compile(plain, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.01)
    loop = Loop(plain)
    for number in range(60):
        length = 60 if IS_FIXED else 50 + number // 6
        inputs = torch.randn(8, length, width)
        with loop.step():
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
    loop.end()
