"""Optimizers and learning-rate schedules from the config, on optax."""

from jaxpar.optim.average import first_average as first_average
from jaxpar.optim.average import next_average as next_average
from jaxpar.optim.build import make_optimizer as make_optimizer
from jaxpar.optim.roles import decay_mask as decay_mask
from jaxpar.optim.schedule import learning_rate as learning_rate
