// What lies around linear layers, for Python: passes, decoder layers, whole models, EAGLE-3 heads.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "core/binding.h"
#include "layers/decoder.h"
#include "layers/eagle3.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kvcellar {
namespace {

void bind_passes(nb::module_& m) {
  m.def(
      "norm",
      [](uintptr_t x, int64_t n_tokens, int64_t n_rows, int64_t dim, int64_t token_stride, Dtype dtype,
         uintptr_t weight, float eps, uintptr_t out) {
        const nb::gil_scoped_release release;
        norm({at(x), n_tokens, n_rows, dim, token_stride, dtype}, at(weight), eps, at(out), n_rows * dim, 0);
      },
      "x"_a, "n_tokens"_a, "n_rows"_a, "dim"_a, "token_stride"_a, "dtype"_a, "weight"_a, "eps"_a, "out"_a,
      "Write ``x / sqrt(mean(x^2) + eps) * weight`` of each row; bfloat16 is rounded before it too.\n\n"
      "Args:\n"
      "    x: address of ``[n_tokens, n_rows, dim]``, the rows of a token one behind the other.\n"
      "    n_tokens: tokens.\n"
      "    n_rows: rows of a token.\n"
      "    dim: numbers of a row.\n"
      "    token_stride: numbers from token to token.\n"
      "    dtype: float32 or bfloat16, of all three.\n"
      "    weight: address of ``[dim]``.\n"
      "    eps: what is added to the mean.\n"
      "    out: address of the result, without gaps.");
  m.def(
      "rotate",
      [](uintptr_t x, int64_t n_tokens, int64_t n_rows, int64_t dim, int64_t token_stride, Dtype dtype, uintptr_t cos,
         uintptr_t sin) {
        const nb::gil_scoped_release release;
        rotate({at(x), n_tokens, n_rows, dim, token_stride, dtype}, at(cos), at(sin), 0);
      },
      "x"_a, "n_tokens"_a, "n_rows"_a, "dim"_a, "token_stride"_a, "dtype"_a, "cos"_a, "sin"_a,
      "Rotate the halves of each row against each other, in place: RoPE.\n\n"
      "Args:\n"
      "    x: address of ``[n_tokens, n_rows, dim]``, the rows of a token one behind the other.\n"
      "    n_tokens: tokens.\n"
      "    n_rows: rows of a token.\n"
      "    dim: numbers of a row, an even number.\n"
      "    token_stride: numbers from token to token.\n"
      "    dtype: float32 or bfloat16, of all three.\n"
      "    cos: address of ``[n_tokens, dim]``.\n"
      "    sin: address of ``[n_tokens, dim]``.");
  m.def(
      "gate",
      [](uintptr_t x, int64_t n_tokens, int64_t dim, Dtype dtype, uintptr_t out) {
        const nb::gil_scoped_release release;
        gate({at(x), n_tokens, 2, dim, 2 * dim, dtype}, at(out), 0);
      },
      "x"_a, "n_tokens"_a, "dim"_a, "dtype"_a, "out"_a,
      "Write ``silu(x[:, 0]) * x[:, 1]`` of ``[n_tokens, 2, dim]``, float32 or bfloat16.");
}

void bind_decoder(nb::module_& m) {
  nb::class_<LinearLayer>(m, "LinearLayer", "Weights, and the address of a bias in the layer's type; 0: none.")
      .def(
          "__init__",
          [](LinearLayer* self, const LinearWeights& weights, uintptr_t bias, const std::vector<LinearWeights>& more) {
            new (self) LinearLayer{weights, at(bias), more};
          },
          "weights"_a, "bias"_a = 0, "more"_a = std::vector<LinearWeights>(),
          "Describe a layer.\n\n"
          "Args:\n"
          "    weights: of it, or of its first outputs.\n"
          "    bias: address of all outputs' bias in the layer's type; 0: none.\n"
          "    more: of the outputs behind these; all are packed then.")
      .def(
          "linear",
          [](const LinearLayer& layer, uintptr_t x, int64_t n_tokens, Dtype dtype, uintptr_t out) {
            const nb::gil_scoped_release release;
            run(layer, at(x), n_tokens, dtype, at(out), 0);
          },
          "x"_a, "n_tokens"_a, "dtype"_a, "out"_a,
          "Run rows ``[n_tokens, n_in]`` to ``[n_tokens, all outputs]``, float32 or bfloat16.");

  nb::class_<Norm>(m, "Norm", "Address of a norm's weight, 0: no norm; and what is added to the mean.")
      .def(
          "__init__",
          [](Norm* self, uintptr_t weight, float eps, bool in_floats) { new (self) Norm{at(weight), eps, in_floats}; },
          "weight"_a, "eps"_a, "in_floats"_a = false,
          "Describe a norm.\n\n"
          "Args:\n"
          "    weight: address; 0: no norm.\n"
          "    eps: what is added to the mean of squares.\n"
          "    in_floats: the weight is float32 whatever the rows are, and results are rounded once.");

  nb::class_<ApartNorms>(m, "ApartNorms", "Norms of a mixture beside an MLP, each of which reads for itself.")
      .def(
          "__init__",
          [](ApartNorms* self, const Norm& router, const Norm& experts, const Norm& experts_said,
             const Norm& mlp_said) { new (self) ApartNorms{router, experts, experts_said, mlp_said}; },
          "router"_a, "experts"_a, "experts_said"_a, "mlp_said"_a,
          "Describe them.\n\n"
          "Args:\n"
          "    router: of what the router reads.\n"
          "    experts: of what experts read.\n"
          "    experts_said: of what they say, together.\n"
          "    mlp_said: of what the MLP says.");

  nb::class_<OwnInputs>(m, "OwnInputs", "What a layer makes of rows of its own, behind its MLP.")
      .def(
          "__init__",
          [](OwnInputs* self, const LinearLayer& gate, const LinearLayer& out, const Norm& norm) {
            new (self) OwnInputs{gate, out, norm};
          },
          "gate"_a, "out"_a, "norm"_a,
          "Describe it: ``x + norm(out(act(gate(x)) * rows))``, by the activation of the layer's MLP.\n\n"
          "Args:\n"
          "    gate: from the layer's sum to as many numbers as its rows have.\n"
          "    out: from there to the sum.\n"
          "    norm: of what that says.");

  nb::class_<DecoderLayer>(m, "DecoderLayer",
                           "A decoder layer, which for a few tokens is two calls around its attention. All rows lie\n"
                           "without gaps, at addresses.")
      .def(
          "__init__",
          [](DecoderLayer* self, const LinearLayer& qkv, const LinearLayer& o, const LinearLayer* gate_up,
             const LinearLayer* down, const Norm& before, const Norm& between, const Norm& q, const Norm& k,
             int64_t n_heads, int64_t n_kv_heads, int64_t head_dim, Dtype dtype, float scale, const Mixture* mixture,
             const Norm* attended, const Norm* mixed, bool norms_together, int64_t n_turned, int64_t rope,
             float residual, const Gate* gate, uintptr_t sinks, const LinearLayer* share, const Norm* v,
             const ApartNorms* apart, const OwnInputs* own, float result) {
            if (!gate_up != !down || (!gate_up && !mixture))
              throw ConfigError("a decoder layer has gate_up and down, or a mixture, or both");
            if ((share || apart) && !(gate_up && mixture))
              throw ConfigError("a share, and norms of its own, are an MLP's beside a mixture");
            const LinearLayer none{};
            new (self) DecoderLayer{qkv,
                                    o,
                                    gate_up ? *gate_up : none,
                                    down ? *down : none,
                                    before,
                                    between,
                                    q,
                                    k,
                                    n_heads,
                                    n_kv_heads,
                                    head_dim,
                                    dtype,
                                    scale,
                                    mixture != nullptr,
                                    mixture ? *mixture : Mixture{},
                                    share ? *share : none,
                                    attended ? *attended : Norm{},
                                    mixed ? *mixed : Norm{},
                                    norms_together,
                                    n_turned,
                                    rope,
                                    residual,
                                    gate ? *gate : Gate{},
                                    at<const float>(sinks),
                                    v ? *v : Norm{},
                                    apart ? *apart : ApartNorms{},
                                    own ? *own : OwnInputs{},
                                    result};
          },
          "qkv"_a, "o"_a, "gate_up"_a.none(), "down"_a.none(), "before"_a, "between"_a, "q"_a, "k"_a, "n_heads"_a,
          "n_kv_heads"_a, "head_dim"_a, "dtype"_a, "scale"_a, "mixture"_a.none() = nb::none(), nb::kw_only(),
          "attended"_a.none() = nb::none(), "mixed"_a.none() = nb::none(), "norms_together"_a = false,
          "n_turned"_a = -1, "rope"_a = 0, "residual"_a = 1.f, "gate"_a.none() = nb::none(), "sinks"_a = 0,
          "share"_a.none() = nb::none(), "v"_a.none() = nb::none(), "apart"_a.none() = nb::none(),
          "own"_a.none() = nb::none(), "result"_a = 1.f,
          "Describe a layer.\n\n"
          "Args:\n"
          "    qkv: q, k and v joined; q alone where an earlier layer's K and V are read.\n"
          "    o: behind the attention.\n"
          "    gate_up: gate and up joined; None: there is no MLP.\n"
          "    down: the last one of the MLP; None: there is none.\n"
          "    before: norm of the layer's input.\n"
          "    between: norm of what comes after attention.\n"
          "    q: norm of q's heads.\n"
          "    k: norm of k's heads.\n"
          "    n_heads: query heads.\n"
          "    n_kv_heads: KV heads; 0: it attends over what an earlier layer has written, and ``qkv`` is\n"
          "        q alone.\n"
          "    head_dim: numbers of a head.\n"
          "    dtype: float32 or bfloat16, of everything but packed weights.\n"
          "    scale: factor on the attention's logits, for a :class:`Decoder`.\n"
          "    mixture: in place of an MLP, or added to what that says.\n"
          "    attended: norm of what the attention says, before it is added; None: there is none.\n"
          "    mixed: norm of what the MLP says, before it is added; None: there is none.\n"
          "    norms_together: all heads of q are normed together, and all of k.\n"
          "    n_turned: the first so many numbers of a head are rotated; -1: all.\n"
          "    rope: which of a forward's rotations.\n"
          "    residual: factor on what is added.\n"
          "    gate: of the MLP; None: silu.\n"
          "    sinks: address of float32 ``[n_heads]``; 0: none.\n"
          "    share: beside a mixture, from the MLP's input to a logit whose sigmoid it is multiplied\n"
          "        with; None: it is added as it is.\n"
          "    v: norm of v's heads; None: there is none.\n"
          "    apart: norms of a mixture beside an MLP; None: both read what ``between`` makes.\n"
          "    own: what the layer makes of rows of its own; None: it has none.\n"
          "    result: factor on what the layer says.\n\n"
          "Raises:\n"
          "    ConfigError: neither an MLP nor a mixture, or a share or norms of what is not both.")
      .def(
          "before",
          [](const DecoderLayer& layer, uintptr_t x, int64_t n_tokens, uintptr_t cos, uintptr_t sin, uintptr_t qkv) {
            const nb::gil_scoped_release release;
            before_attention(layer, at(x), n_tokens, at(cos), at(sin), at(qkv), 0);
          },
          "x"_a, "n_tokens"_a, "cos"_a, "sin"_a, "qkv"_a,
          "Make q, k and v of x ``[n_tokens, hidden]``: normed, projected, q and k normed and rotated.")
      .def(
          "after",
          [](const DecoderLayer& layer, uintptr_t x, uintptr_t attended, int64_t n_tokens, uintptr_t out) {
            if (layer.own.gate.weights.data) throw ConfigError("a layer with rows of its own runs in a Decoder");
            const nb::gil_scoped_release release;
            after_attention(layer, at(x), at(attended), n_tokens, at(out), 0);
          },
          "x"_a, "attended"_a, "n_tokens"_a, "out"_a,
          "Project what was attended, add it to x, and add the gated MLP of its norm to that.\n\n"
          "Raises:\n"
          "    ConfigError: the layer has rows of its own, which a :class:`Decoder` alone is given.");

  nb::class_<Decoder>(m, "Decoder", "A causal model, of which a forward of a few tokens is one call.")
      .def(
          "__init__",
          [](Decoder* self, const nb::sequence& layers, uintptr_t embedding, const Norm& norm, const LinearLayer& head,
             float embedding_scale, float logit_scale, float logit_cap) {
            new (self) Decoder{{}, at(embedding), norm, head, embedding_scale, logit_scale, logit_cap};
            for (const nb::handle layer : layers) self->layers.push_back(nb::cast<const DecoderLayer&>(layer));
            if (self->layers.empty()) throw ConfigError("a decoder has layers");
          },
          "layers"_a, "embedding"_a, "norm"_a, "head"_a, nb::kw_only(), "embedding_scale"_a = 1.f,
          "logit_scale"_a = 1.f, "logit_cap"_a = 0.f,
          nb::sig("def __init__(self, layers: collections.abc.Sequence[DecoderLayer], embedding: int, norm: Norm, "
                  "head: LinearLayer, *, embedding_scale: float = 1.0, logit_scale: float = 1.0, "
                  "logit_cap: float = 0.0) -> None"),
          "Describe a model.\n\n"
          "Args:\n"
          "    layers: one or more.\n"
          "    embedding: address of ``[n_vocab, hidden]``, in the layers' type; 0: the head's weights,\n"
          "        of all but 16 bits.\n"
          "    norm: of the last layer's result.\n"
          "    head: from there to logits.\n"
          "    embedding_scale: factor on rows of the embedding, in the layers' type.\n"
          "    logit_scale: factor on logits.\n"
          "    logit_cap: ``cap * tanh(logit / cap)`` of what that makes; 0.0: none.\n\n"
          "Raises:\n"
          "    ConfigError: no layers.")
      .def(
          "run",
          [](const Decoder& decoder, const nb::sequence& steps, uintptr_t ids, int64_t n_tokens,
             const nb::sequence& ropes, uintptr_t rows, int64_t n_rows, uintptr_t logits,
             const std::vector<int64_t>& feature_layers, uintptr_t features, uintptr_t own) {
            std::vector<LayerStep> found;
            found.reserve(decoder.layers.size());
            for (const nb::handle step : steps)
              found.push_back({nb::cast<Plan*>(step[0]), nb::cast<const Pool*>(step[1]), nb::cast<Plan*>(step[2]),
                               nb::cast<const Pool*>(step[3]), nb::cast<float>(step[4])});
            if (found.size() != decoder.layers.size()) throw ConfigError("a forward needs a step for each layer");
            std::vector<Sides> sides;
            for (const nb::handle rope : ropes)
              sides.push_back({at(nb::cast<uintptr_t>(rope[0])), at(nb::cast<uintptr_t>(rope[1]))});
            for (const DecoderLayer& layer : decoder.layers)
              if (layer.n_turned && layer.rope >= static_cast<int64_t>(sides.size()))
                throw ConfigError("a forward needs the rotations of each layer");
            for (const DecoderLayer& layer : decoder.layers)
              if (layer.own.gate.weights.data && !own) throw ConfigError("a forward needs the rows of each layer");
            const DecoderCall call{found.data(),
                                   n_tokens,
                                   at<const int64_t>(ids),
                                   sides.data(),
                                   n_rows,
                                   at<const int64_t>(rows),
                                   at<float>(logits),
                                   static_cast<int64_t>(feature_layers.size()),
                                   feature_layers.data(),
                                   at<float>(features),
                                   at(own)};
            const nb::gil_scoped_release release;
            run_decoder(decoder, call, 0);
          },
          "steps"_a, "ids"_a, "n_tokens"_a, "ropes"_a, "rows"_a, "n_rows"_a, "logits"_a, "feature_layers"_a,
          "features"_a, "own"_a = 0,
          nb::sig("def run(self, steps: collections.abc.Sequence[tuple[Plan, Pool, Plan | None, Pool | None, float]], "
                  "ids: int, n_tokens: int, ropes: collections.abc.Sequence[tuple[int, int]], rows: int, "
                  "n_rows: int, logits: int, "
                  "feature_layers: collections.abc.Sequence[int], features: int, own: int = 0) -> None"),
          "Run a forward. Ids and rows have to be there: nothing is checked.\n\n"
          "Args:\n"
          "    steps: of each layer its plan and pool, those of exact cells or None twice, and the cap\n"
          "        on logits, 0.0 for none.\n"
          "    ids: int64 ``[n_tokens]``.\n"
          "    n_tokens: tokens.\n"
          "    ropes: what layers may be rotated by: addresses of cosines and of sines, ``[n_tokens,\n"
          "        numbers of a head that are rotated]`` in the layers' type.\n"
          "    rows: int64 ``[n_rows]``, the tokens whose logits are wanted.\n"
          "    n_rows: how many.\n"
          "    logits: float32 ``[n_rows, n_vocab]``.\n"
          "    feature_layers: layers whose input is wanted; behind the last one that is its result.\n"
          "    features: float32 ``[n_tokens, number of feature_layers, hidden]``.\n"
          "    own: ``[n_tokens, layers, size]`` in the layers' type, rows of each layer's own; 0: there are none.\n\n"
          "Raises:\n"
          "    ConfigError: steps, rotations or rows are missing.");
}

void bind_eagle3(nb::module_& m) {
  nb::class_<Eagle3Weights>(m, "Eagle3Weights",
                            "An EAGLE-3 head, for one call per level; ``native/layers/eagle3.h`` says more.")
      .def(
          "__init__",
          [](Eagle3Weights* self, int64_t hidden, int64_t inner, int64_t n_heads, int64_t n_kv_heads, int64_t head_dim,
             int64_t n_vocab, int64_t n_said, float eps, const LinearWeights& qkv, const LinearWeights& o,
             const LinearWeights& gate_up, const LinearWeights& down, const LinearWeights& lm_head, uintptr_t embedding,
             uintptr_t qkv_bias, uintptr_t residual_scale) {
            new (self) Eagle3Weights{hidden,
                                     inner,
                                     n_heads,
                                     n_kv_heads,
                                     head_dim,
                                     n_vocab,
                                     n_said,
                                     eps,
                                     qkv,
                                     o,
                                     gate_up,
                                     down,
                                     lm_head,
                                     at<const float>(embedding),
                                     at<const float>(qkv_bias),
                                     at<const float>(residual_scale)};
          },
          nb::kw_only(), "hidden"_a, "inner"_a, "n_heads"_a, "n_kv_heads"_a, "head_dim"_a, "n_vocab"_a, "n_said"_a,
          "eps"_a, "qkv"_a, "o"_a, "gate_up"_a, "down"_a, "lm_head"_a, "embedding"_a, "qkv_bias"_a = 0,
          "residual_scale"_a = 0,
          "Describe a head.\n\n"
          "Args:\n"
          "    hidden: width of its hidden states.\n"
          "    inner: width of its MLP.\n"
          "    n_heads: query heads.\n"
          "    n_kv_heads: KV heads.\n"
          "    head_dim: numbers of a head.\n"
          "    n_vocab: tokens that it reads.\n"
          "    n_said: tokens that it can say.\n"
          "    eps: of all norms, which have no weights: those are folded into the matrices.\n"
          "    qkv: q, k and v joined; q alone where an earlier layer's K and V are read.\n"
          "    o: behind the attention.\n"
          "    gate_up: gate and up joined.\n"
          "    down: the last one of the MLP.\n"
          "    lm_head: from hidden states to what it can say.\n"
          "    embedding: address of float32 ``[n_vocab, hidden]``.\n"
          "    qkv_bias: address of float32; 0: none.\n"
          "    residual_scale: address of float32 ``[hidden]``, where the residual is the normed\n"
          "        hidden state times it; 0: where it is the hidden state.")
      .def(
          "level",
          [](const Eagle3Weights& weights, Plan& plan, const Pool& pool, Plan* exact_plan, const Pool* exact_pool,
             uintptr_t rope, int64_t n_rope, const std::vector<int64_t>& tokens, const std::vector<int64_t>& positions,
             uintptr_t hidden, int64_t n_hidden, const std::vector<int64_t>& above, const std::vector<int64_t>& rows,
             int64_t k, uintptr_t out, uintptr_t ids, uintptr_t beliefs) {
            if (positions.size() != tokens.size() || above.size() != tokens.size())
              throw ConfigError("a level needs a position and a hidden row for each token");
            const Eagle3Call call{&plan,
                                  &pool,
                                  exact_plan,
                                  exact_pool,
                                  at<const float>(rope),
                                  n_rope,
                                  static_cast<int64_t>(tokens.size()),
                                  tokens.data(),
                                  positions.data(),
                                  at<const float>(hidden),
                                  n_hidden,
                                  above.data(),
                                  static_cast<int64_t>(rows.size()),
                                  rows.data(),
                                  k,
                                  at<float>(out),
                                  at<int64_t>(ids),
                                  at<float>(beliefs)};
            const nb::gil_scoped_release release;
            eagle3_level(weights, call, 0);
          },
          "plan"_a, "pool"_a, "exact_plan"_a.none(), "exact_pool"_a.none(), "rope"_a, "n_rope"_a, "tokens"_a,
          "positions"_a, "hidden"_a, "n_hidden"_a, "above"_a, "rows"_a, "k"_a, "out"_a, "ids"_a, "beliefs"_a,
          "Write K and V of all tokens, attend, and say what is likeliest behind some of them.\n\n"
          "Args:\n"
          "    plan: of this level.\n"
          "    pool: the head's.\n"
          "    exact_plan: what is written to exact cells too.\n"
          "    exact_pool: where these are.\n"
          "    rope: float32 ``[2, n_rope, head_dim]``: cosines, and sines with the sign of their half.\n"
          "    n_rope: positions of it.\n"
          "    tokens: as it reads them.\n"
          "    positions: one of each token.\n"
          "    hidden: float32 ``[n_hidden, hidden]``.\n"
          "    n_hidden: rows of it.\n"
          "    above: which of those rows each token goes on from.\n"
          "    rows: the tokens behind which something is said.\n"
          "    k: guesses behind each.\n"
          "    out: float32 ``[n_rows, hidden]``.\n"
          "    ids: int64 ``[n_rows, k]``, the likeliest first.\n"
          "    beliefs: float32 ``[n_rows, k]``: how likely each is, among all that it can say.");
}

}  // namespace

void bind_layers(nb::module_& m) {
  bind_passes(m);
  bind_decoder(m);
  bind_eagle3(m);
}

}  // namespace kvcellar
