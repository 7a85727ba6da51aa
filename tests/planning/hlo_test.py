"""Reading compiled programs: loops multiplied out, bytes, operations."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

from grpo_jax.mesh import sharding
from grpo_jax.planning import hlo

pytestmark = pytest.mark.quick

SIZE = 64


def compiled(function, *shapes, **options):
  return jax.jit(function, **options).lower(*shapes).compile()


def square(place=None):
  return jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, sharding=place)


def product(x, y):
  return jnp.dot(x, y, precision=lax.Precision.HIGHEST)


def test_a_product_counts_two_for_each_pair():
  program = hlo.Program(compiled(product, square(), square()).as_text())
  assert program.flops() == 2 * SIZE**3


@pytest.mark.parametrize('trips', [1, 3, 7])
def test_a_loop_of_known_length_is_multiplied_out(trips):
  def loop(x):
    return lax.scan(lambda y, _: (product(y, x), None), x, length=trips)[0]

  program = hlo.Program(compiled(loop, square()).as_text())
  assert program.flops() == trips * 2 * SIZE**3


def test_loops_in_loops_multiply():
  def inner(x):
    return lax.fori_loop(0, 3, lambda _, y: product(y, x), x)

  def outer(x):
    return lax.fori_loop(0, 5, lambda _, y: inner(y), x)

  program = hlo.Program(compiled(outer, square()).as_text())
  assert program.flops() == 15 * 2 * SIZE**3


def test_a_loop_whose_length_is_data_runs_as_often_as_is_said():
  def loop(x, number):
    return lax.fori_loop(0, number, lambda _, y: product(y, x), x)

  number = jax.ShapeDtypeStruct((), jnp.int32)
  text = compiled(loop, square(), number).as_text()
  found = [hlo.Program(text, trips).flops() for trips in (1, 11)]
  assert found == [2 * SIZE**3, 11 * 2 * SIZE**3]


@pytest.mark.parametrize(
  'other', [lambda x: product(product(x.T, x), x), lambda x: x], ids=['2', '0']
)
def test_of_a_conditional_the_lightest_branch_that_multiplies_counts(other):
  def branch(x, which):
    return lax.cond(which, lambda: product(x, x), lambda: other(x))

  which = jax.ShapeDtypeStruct((), bool)
  program = hlo.Program(compiled(branch, square(), which).as_text())
  assert program.flops() == 2 * SIZE**3


def test_gathered_bytes_and_groups():
  mesh = sharding.make_mesh(data=2, fsdp=4)
  split = NamedSharding(mesh, P('fsdp', None))
  whole = NamedSharding(mesh, P())
  text = compiled(lambda x: x + 1, square(split), out_shardings=whole).as_text()
  (one,) = hlo.Program(text, devices=8).collectives()
  assert (one.kind, one.dtype) == ('all-gather', 'f32')
  assert (one.bytes, one.times, one.group) == (4 * SIZE**2, 1, 4)
  assert one.sent == (4 * SIZE**2 * 3 / 4, 0)


def test_a_sum_in_a_loop_counts_with_its_trips():
  mesh = sharding.make_mesh(fsdp=8)
  rows = NamedSharding(mesh, P(None, 'fsdp'))
  whole = NamedSharding(mesh, P())

  def loop(x):
    def body(_, y):
      moved = jnp.tanh(x + y)  # so that the sum stays in the loop
      summed = lax.with_sharding_constraint(product(moved, x.T), whole)
      return y + jnp.tanh(summed + y)

    return lax.fori_loop(0, 6, body, jnp.zeros((SIZE, SIZE)))

  text = compiled(loop, square(rows), out_shardings=whole).as_text()
  found = hlo.Program(text, devices=8).collectives()
  sums = [one for one in found if one.kind == 'all-reduce']
  assert sum(one.bytes * one.times for one in sums) == 6 * 4 * SIZE**2
  assert all(one.group == 8 for one in sums)
  assert sum(one.sent[0] for one in sums) == pytest.approx(
    sum(one.bytes * one.times for one in sums) * 2 * 7 / 8
  )


# As libtpu writes them, but for what nobody reads: a sum over four slices, five
# times; arrays gathered from two; and an exchange.
SLICES = """
%body (t: (s32[], f32[128,8,128])) -> (s32[], f32[128,8,128]) {
  %t = (s32[]{:T(128)}, f32[128,8,128]{2,1,0}) parameter(0)
  %send = (f32[128,8,128]{2,1,0:T(8,128)}, u32[], token[]) send(%t, %all), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3,4}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[128,8,128]{2,1,0:T(8,128)}, u32[], token[]) recv(%all), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_reduce_operation="SUM",_xla_megascale_target="{1,2,3,4}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %sent = token[] send-done(%send), channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %came = (f32[128,8,128]{2,1,0:T(8,128)}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
}

%condition (t: (s32[], f32[128,8,128])) -> pred[] {
  %n = s32[]{:T(128)} constant(5)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[512,256]) -> f32[512,256] {
  %x = f32[512,256]{1,0:T(8,128)} parameter(0)
  %loop = (s32[]{:T(128)}, f32[128,8,128]{2,1,0}) while(%x), condition=%condition, body=%body
  %near = f32[512,256]{1,0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add
  %recv.1 = (f32[1024,256]{1,0:T(8,128)}, u32[], token[]) recv(%all), channel_id=3, is_host_transfer=true, frontend_attributes={_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_GATHER"}
  %recv.2 = (f32[512,256]{1,0:T(8,128)}, u32[], token[]) recv(%all), channel_id=5, is_host_transfer=true, frontend_attributes={_xla_megascale_target={{100000->200000},{200000->100000}},_xla_megascale_transfer_type="ONE_TO_ONE"}
  %recv.3 = (f32[4,128,256]{2,1,0:T(8,128)}, u32[], token[]) recv(%all), channel_id=7, is_host_transfer=true, frontend_attributes={_xla_megascale_target={{100000,200000,300000,400000},{100001,200001,300001,400001}},_xla_megascale_transfer_type="ALL_TO_ALL"}
  ROOT %recv.4 = (bf16[256]{0}, u32[], token[]) recv(%all), channel_id=9, is_host_transfer=true
}
"""  # noqa: E501


def test_what_goes_to_other_slices_is_read():
  found = hlo.Program(SLICES, devices=4).collectives()
  number = 4 * 512 * 256  # bytes
  far = {one.kind: one for one in found if one.crosses}
  assert len(far) == 4  # `recv` from a host is none
  assert (far['all-reduce'].dtype, far['all-reduce'].times) == ('f32', 5)
  assert {kind: one.sent for kind, one in far.items()} == {
    'all-reduce': (0, 5 * 2 * number * 3 / 4),
    'all-gather': (0, number),  # half of what results
    'collective-permute': (0, number),
    'all-to-all': (0, number * 3 / 4),
  }
  (near,) = (one for one in found if not one.crosses)
  assert near.sent == (2 * number * 3 / 4, 0)


def test_what_is_scattered_is_sent_whole():
  scatter = hlo.Collective('reduce-scatter', 'f32', 128, 1, group=8)
  assert scatter.sent == (128 * 7, 0)


TPU = """
HloModule jit_step, is_scheduled=true

%fused_computation (p: bf16[688,128], q: bf16[128,256]) -> f32[688,256] {
  %p = bf16[688,128]{1,0:T(8,128)(2,1)} parameter(0)
  %q = bf16[128,256]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  ROOT %c = f32[688,256]{1,0:T(8,128)} convolution(%p, %q), dim_labels=bf_io->bf
}

%body (t: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %t = (s32[]{:T(128)}, f32[8,4]{1,0:T(8,128)}) parameter(0)
  %g = f32[8,4]{1,0:T(8,128)} all-gather(%t), replica_groups=mesh['a'=4,'b'=2] {'a'}, dimensions={0}
  %s = f32[8,86,2,32]{1,3,2,0:T(8,128)S(1)} convolution(%l, %r), window={size=1x2 pad=0_0x1_1 rhs_reversal=0x1}, dim_labels=0bf1_1oi0->0b1f
  %l = f32[8,86,128,1]{2,1,3,0} parameter(1)
  %r = f32[2,32,128,1]{2,1,3,0} parameter(2)
}

%condition (t: (s32[], f32[8,4])) -> pred[] {
  %n = s32[]{:T(128)} constant(24)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %less = pred[]{:T(512)} compare(%i, %n), direction=LT
}

ENTRY %main (a: bf16[688,128]) -> f32[688,256] {
  %a = bf16[688,128]{1,0:T(8,128)(2,1)} parameter(0)
  %loop = (s32[]{:T(128)}, /*index=1*/f32[8,4]{1,0}) while(%t), condition=%condition, body=%body
  %k = f32[8,128,128]{2,1,0:T(8,128)} custom-call(%a), custom_call_target="tpu_custom_call"
  ROOT %f = f32[688,256]{1,0:T(8,128)} fusion(%a, %b), kind=kOutput, calls=%fused_computation
}
"""  # noqa: E501


def test_what_a_tpu_prints_is_read():
  program = hlo.Program(TPU, devices=8)
  (gather,) = program.collectives()
  assert (gather.bytes, gather.times, gather.group) == (128, 24, 4)
  assert program.kernels() == 1
  # The product of heads is a convolution whose window slides over two places,
  # of which one at a time is inside.
  heads = 2 * 8 * 86 * 2 * 32 * 128
  assert program.flops() == 2 * 688 * 128 * 256 + 24 * heads


HIDDEN = """
%start (p: bf16[4,64]) -> bf16[4,128] {
  %p = bf16[4,64]{1,0} parameter(0)
  ROOT %g.1 = bf16[4,128]{1,0} all-gather(%p), channel_id=8, replica_groups={{0,2},{1,3}}, dimensions={1}, frontend_attributes={chain_id="0"}
}

%done (p: bf16[4,64]) -> bf16[4,128] {
  %p = bf16[4,64]{1,0} parameter(0)
  ROOT %g.2 = bf16[4,128]{1,0} all-gather(%p), channel_id=8, replica_groups={{0,2},{1,3}}, dimensions={1}, frontend_attributes={chain_id="0"}
}

%all-reduce-scatter.9 (p: f32[8,8]) -> f32[4,8] {
  %p = f32[8,8]{1,0} parameter(0)
  %r = (f32[8,8]{1,0}, f32[8,8]{1,0}) all-reduce(%p, %p), channel_id=9, replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %s = f32[4,8]{1,0} dynamic-slice(%r, %i)
}

ENTRY %main (a: bf16[4,64]) -> bf16[4,128] {
  %a = bf16[4,64]{1,0} parameter(0)
  %f = bf16[4,128]{1,0} fusion(%a), kind=kCustom, calls=%start
  %m = f32[4,8]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.9
  %w = ((bf16[4,64]{1,0}, bf16[4,64]{1,0}), (bf16[8,64]{1,0}, bf16[8,64]{1,0})) all-gather-start(%a, %a), channel_id=3, replica_groups={{0,1},{2,3}}, dimensions={0}
  ROOT %d = bf16[4,128]{1,0} fusion(%f), kind=kCustom, calls=%done
}
"""  # noqa: E501


def test_what_a_tpu_hides_behind_other_work_counts_once():
  hidden, scatter, gather = hlo.Program(HIDDEN, devices=4).collectives()
  assert (hidden.kind, hidden.bytes, hidden.times) == ('all-gather', 1024, 1)
  # Two arrays are summed over two devices, each of which keeps half.
  assert (scatter.kind, scatter.bytes) == ('reduce-scatter', 256)
  assert scatter.sent == (256, 0)
  assert (gather.bytes, gather.group) == (2 * 1024, 2)


def test_nothing_is_counted_that_does_not_run():
  text = TPU.replace('while(%t)', 'while(%t), dead=1').replace(
    'body=%body', 'body=%gone'
  )
  assert not hlo.Program(text, devices=8).collectives()
