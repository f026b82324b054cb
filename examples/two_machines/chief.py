from model import STEPS, accuracy, begin, update

import redisacc

parameters, velocity = begin()
with redisacc.Chief("two-machines", parameters, state=velocity, workers=2) as chief:
    for taken in chief.rounds(until=STEPS):
        parameters, velocity = update(chief.parameters, chief.state, taken.gradient)
        chief.publish(parameters, state=velocity)
        if chief.step % 100 == 0:
            print(f"step {chief.step}: accuracy {accuracy(parameters):.3f}, gradients of {', '.join(taken.workers)}")
