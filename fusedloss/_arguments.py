"What `help` adds to docstrings: made by tools/build_arguments.py from the comments beside arguments, and edited there."

SECTIONS = {
    "fusedloss.baseline BaselineSoftmax": (
        "Args:\n"
        "    proj_weight (nn.Parameter): [V,H], shared with its owner\n"
        "    tile_factor (int): taken for a common signature; this loss has one tile\n"
        "    log_softmax (bool): log-probabilities, else probabilities\n"
        "    margin (float): LMCL: taken off the target's cosine\n"
        "    scale (float | None): LMCL where given: what cosines are multiplied by"),
    "fusedloss.baseline BaselineSoftmax.forward": (
        "Args:\n"
        "    input (Tensor): [N,H] or [B,S,H]\n"
        "    target (Tensor | None): [N] or [B,S]; only LMCL's margin needs it\n"
        "\n"
        "Returns:\n"
        "    Tensor: [N,V] or [B,S,V], float32 (float64 for float64)"),
    "fusedloss.baseline BaselineSoftmaxNllLoss": (
        "Args:\n"
        "    proj_weight (nn.Parameter): [V,H], shared with its owner\n"
        "    tile_factor (int): taken for a common signature; this loss has one tile\n"
        "    log_softmax (bool): log-probabilities, else probabilities\n"
        "    margin (float): LMCL: taken off the target's cosine\n"
        "    scale (float | None): LMCL where given: what cosines are multiplied by"),
    "fusedloss.baseline BaselineSoftmaxNllLoss.forward": (
        "Args:\n"
        "    input (Tensor): [N,H] or [B,S,H]\n"
        "    target (Tensor): [N] or [B,S]\n"
        "\n"
        "Returns:\n"
        "    Tensor: scalar, float32 (float64 for float64)"),
    "fusedloss.baseline baseline_linear_cross_entropy": (
        "Args:\n"
        "    input (Tensor): what the linear layer multiplies, [..., H]\n"
        "    linear_weight (Tensor): of the linear layer, [V,H]\n"
        "    target (Tensor): [...], integers in [0, V), or `ignore_index`\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over valid tokens, or \"sum\"\n"
        "    ignore_index (int): tokens with this target count nothing\n"
        "    margin (float): LMCL: taken off the target's cosine\n"
        "    scale (float | None): LMCL where given: what cosines are multiplied by\n"
        "\n"
        "Returns:\n"
        "    Tensor: float32 (float64 for float64), a scalar or [...]"),
    "fusedloss.chunks ChunkedLinearCrossEntropyLoss.forward": (
        "Args:\n"
        "    input (Tensor): what the linear layer multiplies, [..., H]\n"
        "    target (Tensor): the classes, [...]\n"
        "    token_weight (Tensor | None): [...]\n"
        "    max_valid (int | None): a promise: no more tokens than this are not ignored\n"
        "\n"
        "Returns:\n"
        "    Tensor: float32 (float64 for float64)"),
    "fusedloss.chunks ChunkedLinearCrossEntropyLoss.settings": (
        "Returns:\n"
        "    dict[str, Any]"),
    "fusedloss.chunks chunked_linear_cross_entropy": (
        "Args:\n"
        "    input (Tensor): what the linear layer multiplies, [..., H]\n"
        "    linear_weight (Tensor | nn.Module): [V,H], or an `nn.Linear` or `nn.Embedding` that has it\n"
        "    target (Tensor): [...], integers in [0, V), or `ignore_index`\n"
        "    linear_bias (Tensor | None): of the linear layer, [V]\n"
        "    weight (Tensor | None): [V], of classes; without gradient\n"
        "    reduction (Literal[\"mean\", \"sum\"]): \"mean\" is over the weights of valid tokens\n"
        "    token_weight (Tensor | None): of the target's shape; without gradient\n"
        "    chunk_size (int | None): B, rows of logits in memory at once\n"
        "    memory_budget (int | None): bytes beyond the gradients, autocast's 16-bit copies included\n"
        "    accumulate (Literal[\"auto\", \"float32\", \"native\"]): chunks of dw add up in \"float32\", \"native\",\n"
        "        or by the plan\n"
        "    grad_buffer (Tensor | None): [V,H] float32; dw is added to it in backward\n"
        "    max_valid (int | None): a promise: no more tokens than this are not ignored\n"
        "    return_stats (bool): `(loss, CrossEntropyStats)`, all of it without gradient\n"
        "    ignore_index (int): tokens with this target count nothing\n"
        "    label_smoothing (float): share of the target spread over all classes\n"
        "    logit_scale (float | Tensor): multiplies the logits, bias and all; a 0-dim tensor, of any sign,\n"
        "        gets a gradient\n"
        "    softcap (float | None): c: scores are c · tanh(scaled logits / c), undivided by a temperature T:\n"
        "        that is s/T, c/T\n"
        "    z_loss (float): weight of lse² in each token's loss\n"
        "\n"
        "Returns:\n"
        "    Tensor | tuple[Tensor, CrossEntropyStats]: float32 (float64 for float64), a scalar"),
    "fusedloss.clusters cross_entropy": (
        "Args:\n"
        "    input (Tensor): [V], [N,V] or [N,V,d1,...], logits\n"
        "    target (Tensor): [], [N] or [N,d1,...], integers in [0, V), or `ignore_index`; or probabilities,\n"
        "        of the input's shape\n"
        "    weight (Tensor | None): [V], of classes; without gradient\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over the weights of valid tokens, or\n"
        "        \"sum\"\n"
        "    token_weight (Tensor | None): of the labels' shape; without gradient\n"
        "    inplace (bool): where a gradient is due, put it in the place of the logits\n"
        "    return_stats (bool): `(loss, CrossEntropyStats)` instead of the loss\n"
        "    ignore_index (int): tokens with this target count nothing\n"
        "    label_smoothing (float): share of the target spread over all classes\n"
        "    logit_scale (float | Tensor): multiplies the logits, bias and all; a 0-dim tensor, of any sign,\n"
        "        gets a gradient\n"
        "    softcap (float | None): c: scores are c · tanh(scaled logits / c), undivided by a temperature T:\n"
        "        that is s/T, c/T\n"
        "    z_loss (float): weight of lse² in each token's loss\n"
        "\n"
        "Returns:\n"
        "    Tensor | tuple[Tensor, CrossEntropyStats]: float32 (float64 for float64)"),
    "fusedloss.contrast contrastive_loss": (
        "Args:\n"
        "    x (Tensor): [N,H], features of one kind, such as images', commonly unit vectors\n"
        "    y (Tensor): [N,H], of the other, such as texts': row i belongs to row i of x; with `positives`\n"
        "        [M,H]\n"
        "    logit_scale (float | Tensor): multiplies the dot products; a 0-dim tensor may have a gradient\n"
        "    positives (Tensor | None): [N] or [N,P] int64: the rows of y that belong to each row of x, -1\n"
        "        for none; over ranks of all ranks' y\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over pairs, or \"sum\"\n"
        "    memory_budget (int | None): bytes of the scores in memory at once\n"
        "    mesh (DeviceMesh | None): of one dimension: its ranks have rows of their own, contrasted with\n"
        "        those of all\n"
        "    backbone_reduction (Literal[\"mean\", \"sum\"] | None): what a wrapper makes of the ranks' gradients\n"
        "\n"
        "Returns:\n"
        "    Tensor: float32 (float64 for float64), a scalar, or [N]"),
    "fusedloss.contrast sigmoid_contrastive_loss": (
        "Args:\n"
        "    x (Tensor): [N,H], features of one kind, such as images', commonly unit vectors\n"
        "    y (Tensor): [N,H], of the other, such as texts': row i belongs to row i of x; with `positives`\n"
        "        [M,H]\n"
        "    logit_scale (float | Tensor): multiplies the dot products; a 0-dim tensor may have a gradient\n"
        "    logit_bias (float | Tensor): is added to them; likewise\n"
        "    positives (Tensor | None): [N] or [N,P] int64: the rows of y that belong to each row of x, -1\n"
        "        for none; over ranks of all ranks' y\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over the rows of x, or \"sum\"\n"
        "    memory_budget (int | None): bytes of the scores in memory at once\n"
        "    mesh (DeviceMesh | None): of one dimension: its ranks have rows of their own, contrasted with\n"
        "        those of all\n"
        "    backbone_reduction (Literal[\"mean\", \"sum\"] | None): what a wrapper makes of the ranks' gradients\n"
        "\n"
        "Returns:\n"
        "    Tensor: float32 (float64 for float64), a scalar, or [N]"),
    "fusedloss.core.options CrossEntropyStats": (
        "Args:\n"
        "    lse (Tensor): of the target's shape, differentiable\n"
        "    entropy (Tensor): of the target's shape, nats, differentiable\n"
        "    accuracy (Tensor): scalar, the share of valid tokens whose target leads\n"
        "    target_rank (Tensor): of the target's shape, int64, 0 for the highest score\n"
        "    logit_max (Tensor): of the target's shape, of the scores, as are all of these\n"
        "    logit_norm (Tensor): of the target's shape\n"
        "    z_loss (Tensor): of the target's shape, this term's share of the loss\n"
        "    n_valid (Tensor): scalar, int64"),
    "fusedloss.core.options LossOptions": (
        "Args:\n"
        "    ignore_index (int): tokens with this target count nothing\n"
        "    label_smoothing (float): share of the target spread over all classes\n"
        "    logit_scale (float): multiplies the logits, bias and all; a 0-dim tensor, of any sign, gets a\n"
        "        gradient\n"
        "    softcap (float): c: scores are c · tanh(scaled logits / c), undivided by a temperature T: that\n"
        "        is s/T, c/T\n"
        "    z_loss (float): weight of lse² in each token's loss"),
    "fusedloss.core.popularity PopularitySampler": (
        "Args:\n"
        "    popularity (Tensor): [V], counts or probabilities, above 0; equal numbers: uniform\n"
        "    num_samples (int): classes that are drawn, for the batch or for each of its rows\n"
        "    each_row (bool): whether each row has negatives of its own\n"
        "    log_q (bool): subtract from scores the log of how often their class is drawn\n"
        "    seed (int): of the draws"),
    "fusedloss.core.popularity PopularitySampler.forward": (
        "Args:\n"
        "    rows (int): of the batch; 1 for a sample that all share\n"
        "\n"
        "Returns:\n"
        "    Tensor: [rows, num_samples] int64, -1 in the place of a class that was missed"),
    "fusedloss.core.popularity PopularitySampler.log_draws": (
        "Args:\n"
        "    classes (Tensor): int64, any shape\n"
        "\n"
        "Returns:\n"
        "    Tensor: float64, 0 for classes that are certain"),
    "fusedloss.core.sampling NegativeSampler": (
        "Args:\n"
        "    rate (float | Literal[\"positives\"]): of the classes, in (0, 1]; or the batch's alone\n"
        "    seed (int): of the draws\n"
        "    log_q (bool): correct the sum for the classes that were not drawn"),
    "fusedloss.core.sampling NegativeSampler.find": (
        "Args:\n"
        "    y (Tensor): classes\n"
        "    start (int): as in the call\n"
        "\n"
        "Returns:\n"
        "    Tensor: int64 of y's shape"),
    "fusedloss.core.sampling NegativeSampler.forward": (
        "Args:\n"
        "    stop (int): the class after the last\n"
        "    start (int): the first class; a rank draws from its own\n"
        "\n"
        "Returns:\n"
        "    Tensor: int64, -1 in empty slots"),
    "fusedloss.core.sequences Span": (
        "Args:\n"
        "    label (int): the class\n"
        "    start (int): its first frame\n"
        "    end (int): the frame behind its last one\n"
        "    score (float): mean log-probability of its frames"),
    "fusedloss.ctc Alignment": (
        "Args:\n"
        "    score (Tensor): [N] of the path: the sum of its frames' log-probabilities\n"
        "    labels (Tensor): [N,T] the class of each frame: a label or the blank\n"
        "    states (Tensor): [N,T] 2k+1 for the target's label k, 2k for the blank before it\n"
        "    frame_scores (Tensor): [N,T] log-probability of each frame's class; 0 beyond"),
    "fusedloss.ctc CTCLoss": (
        "Args:\n"
        "    blank (int): the class that stands for no label\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\"; \"sum\"; \"mean\" of losses over their target's\n"
        "        length\n"
        "    zero_infinity (bool): 0 instead of +∞ where no alignment exists\n"
        "    logits (bool): whether it is given logits"),
    "fusedloss.ctc CTCLoss.forward": (
        "Args:\n"
        "    log_probs (Tensor): [T,N,C] or [T,C] log-probabilities; fp16, bf16, fp32, fp64\n"
        "    targets (Tensor): [N,L], or [sum of target_lengths] one after another\n"
        "    input_lengths (Tensor | Sequence[int] | None): [N] frames: a tensor, a tuple or a list; None:\n"
        "        all\n"
        "    target_lengths (Tensor | Sequence[int] | None): [N] labels; None: of each all but negative ones\n"
        "        at its end\n"
        "\n"
        "Returns:\n"
        "    Tensor: [N] with \"none\", else a scalar"),
    "fusedloss.ctc CTCPosteriors": (
        "Args:\n"
        "    states (Tensor): [N,T,S] that the path is in a state; S = 2·longest target + 1, compiled\n"
        "        2·min(T, L) + 1\n"
        "    log_likelihood (Tensor): [N] log of the sum over all paths; −∞ where there is none\n"
        "    entropy (Tensor): [N] of the path, in nats"),
    "fusedloss.ctc ctc_loss": (
        "Args:\n"
        "    log_probs (Tensor): [T,N,C] or [T,C] log-probabilities; fp16, bf16, fp32, fp64\n"
        "    targets (Tensor): [N,L], or [sum of target_lengths] one after another\n"
        "    input_lengths (Tensor | Sequence[int] | None): [N] frames: a tensor, a tuple or a list; None:\n"
        "        all\n"
        "    target_lengths (Tensor | Sequence[int] | None): [N] labels; None: of each all but negative ones\n"
        "        at its end\n"
        "    blank (int): the class that stands for no label\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\"; \"sum\"; \"mean\" of losses over their target's\n"
        "        length\n"
        "    zero_infinity (bool): 0 instead of +∞ where no alignment exists\n"
        "    gradient (Literal[\"torch\", \"exact\"]): exp(log_probs) − γ, or the derivative, −γ\n"
        "\n"
        "Returns:\n"
        "    Tensor: [N] or a scalar, float32 (float64 for float64)"),
    "fusedloss.ctc ctc_loss_with_logits": (
        "Args:\n"
        "    logits (Tensor): [T,N,C] or [T,C]\n"
        "    targets (Tensor): [N,L], or [sum of target_lengths] one after another\n"
        "    input_lengths (Tensor | Sequence[int] | None): [N] frames: a tensor, a tuple or a list; None:\n"
        "        all\n"
        "    target_lengths (Tensor | Sequence[int] | None): [N] labels; None: of each all but negative ones\n"
        "        at its end\n"
        "    blank (int): the class that stands for no label\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\"; \"sum\"; \"mean\" of losses over their target's\n"
        "        length\n"
        "    zero_infinity (bool): 0 instead of +∞ where no alignment exists\n"
        "\n"
        "Returns:\n"
        "    Tensor: [N] or a scalar, float32 (float64 for float64)"),
    "fusedloss.ctc ctc_posteriors": (
        "Args:\n"
        "    log_probs (Tensor): [T,N,C] or [T,C] log-probabilities; fp16, bf16, fp32, fp64\n"
        "    targets (Tensor): [N,L], or [sum of target_lengths] one after another\n"
        "    input_lengths (Tensor | Sequence[int] | None): [N] frames: a tensor, a tuple or a list; None:\n"
        "        all\n"
        "    target_lengths (Tensor | Sequence[int] | None): [N] labels; None: of each all but negative ones\n"
        "        at its end\n"
        "    blank (int): the class that stands for no label\n"
        "\n"
        "Returns:\n"
        "    CTCPosteriors"),
    "fusedloss.ctc forced_align": (
        "Args:\n"
        "    log_probs (Tensor): [T,N,C] or [T,C] log-probabilities; fp16, bf16, fp32, fp64\n"
        "    targets (Tensor): [N,L], or [sum of target_lengths] one after another\n"
        "    input_lengths (Tensor | Sequence[int] | None): [N] frames: a tensor, a tuple or a list; None:\n"
        "        all\n"
        "    target_lengths (Tensor | Sequence[int] | None): [N] labels; None: of each all but negative ones\n"
        "        at its end\n"
        "    blank (int): the class that stands for no label\n"
        "\n"
        "Returns:\n"
        "    Alignment"),
    "fusedloss.decode Hypotheses": (
        "Args:\n"
        "    labels (Tensor): [N,k,T] classes; −1 beyond a length\n"
        "    lengths (Tensor): [N,k] int64, of the label sequences\n"
        "    log_probs (Tensor): [N,k] of the best path, or of all paths that a beam found\n"
        "    timesteps (Tensor | None): [N,k,T] first frame of each label, if asked; −1 beyond a length"),
    "fusedloss.decode ctc_decode": (
        "Args:\n"
        "    log_probs (Tensor): [T,N,C] or [T,C] log-probabilities; fp16, bf16, fp32, fp64\n"
        "    input_lengths (Tensor | Sequence[int] | None): [N] frames: a tensor, a tuple or a list; None:\n"
        "        all\n"
        "    blank (int): the class that stands for no label\n"
        "    beam_size (int): prefixes that are kept; 1: the best path alone\n"
        "    k (int): label sequences to return, at most `beam_size`\n"
        "    timesteps (bool): whether to return the frame of each label\n"
        "    beam (int | None): deprecated: the old name of `beam_size`\n"
        "\n"
        "Returns:\n"
        "    Hypotheses: [N,k,...]; [k,...] without a batch"),
    "fusedloss.divergence linear_divergence": (
        "Args:\n"
        "    input (Tensor): [..., H], the student's hidden states\n"
        "    linear_weight (Tensor | nn.Module): [V,H], or an `nn.Linear` or `nn.Embedding` that has it\n"
        "    teacher_input (Tensor | None): [..., H'], the teacher's hidden states of the same tokens\n"
        "    teacher_weight (Tensor | nn.Module | None): [V,H'], or a module that has it\n"
        "    kind (Literal[\"forward_kl\", \"reverse_kl\", \"jsd\"]): \"forward_kl\": KL(p‖q), p the teacher's;\n"
        "        \"reverse_kl\": KL(q‖p); or \"jsd\"\n"
        "    beta (float): of \"jsd\", the teacher's share of the mixture; 0 is forward KL, 1 reverse KL\n"
        "    temperature (float | Tensor): T, divides the scores of both; or floats that broadcast to [...].\n"
        "        The loss is not multiplied by T²\n"
        "    logit_scale (float | Tensor): multiplies the student's logits, bias and all; a 0-dim tensor gets\n"
        "        a gradient\n"
        "    teacher_logit_scale (float): multiplies the logits of the teacher's head\n"
        "    softcap (float | None): c: the student's scores are c · tanh(scaled logits / c), before the\n"
        "        temperature\n"
        "    teacher_softcap (float | None): the same of the teacher\n"
        "    token_weight (Tensor | None): [...]; a token of weight 0 costs nothing; without gradient\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over the token weights, or \"sum\"\n"
        "    linear_bias (Tensor | None): of the linear layer, [V]\n"
        "    teacher_bias (Tensor | None): [V]\n"
        "    teacher_top (tuple[Tensor, Tensor] | None): (indices, log_probs), each [..., K], in the place of\n"
        "        the teacher's head; index -1: an empty entry\n"
        "    top_rest (Literal[\"class\", \"drop\"]): all classes not in the list: one \"class\", or \"drop\" their\n"
        "        terms\n"
        "    n_classes (int | None): the first classes, which both have; rows beyond pad, and no softmax has\n"
        "        them\n"
        "    max_valid (int | None): a promise: no more tokens than this have a weight\n"
        "    memory_budget (int | None): bytes beyond the gradients, autocast's 16-bit copies included\n"
        "\n"
        "Returns:\n"
        "    Tensor: float32 (float64 for float64), a scalar, or [...]"),
    "fusedloss.filter recompute_linear_cross_entropy": (
        "Args:\n"
        "    input (Tensor): what the linear layer multiplies, [..., H]\n"
        "    linear_weight (Tensor | nn.Module): [V,H], or an `nn.Linear` or `nn.Embedding` that has it\n"
        "    target (Tensor): [...], integers in [0, V), or `ignore_index`\n"
        "    linear_bias (Tensor | None): of the linear layer, [V]\n"
        "    weight (Tensor | None): [V], of classes; without gradient\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over the weights of valid tokens, or\n"
        "        \"sum\"\n"
        "    token_weight (Tensor | None): of the target's shape; without gradient\n"
        "    memory_budget (int | None): bytes beyond the gradients, autocast's 16-bit copies included; by\n"
        "        default 256 MiB\n"
        "    filter_eps (float | None): tiles of smaller p: by their mean in dx, dw\n"
        "    return_stats (bool): `(loss, CrossEntropyStats)` instead of the loss\n"
        "    ignore_index (int): tokens with this target count nothing\n"
        "    label_smoothing (float): share of the target spread over all classes\n"
        "    logit_scale (float | Tensor): multiplies the logits, bias and all; a 0-dim tensor, of any sign,\n"
        "        gets a gradient\n"
        "    softcap (float | None): c: scores are c · tanh(scaled logits / c), undivided by a temperature T:\n"
        "        that is s/T, c/T\n"
        "    z_loss (float): weight of lse² in each token's loss\n"
        "\n"
        "Returns:\n"
        "    Tensor | tuple[Tensor, CrossEntropyStats]: float32 (float64 for float64)"),
    "fusedloss.integrations.causal_lm causal_lm_loss": (
        "Args:\n"
        "    logits (Tensor | None): [B,T,V]; None: of `hidden_states` and `lm_head_weight`\n"
        "    labels (Tensor | None): [B,T], of the same positions as the logits\n"
        "    vocab_size (int | None): V\n"
        "    num_items_in_batch (Tensor | int | None): the sum is divided by it; None: the mean\n"
        "    ignore_index (int): labels that count nothing\n"
        "    shift_labels (Tensor | None): [B,T], labels of the positions after\n"
        "    hidden_states (Tensor | None): [B,T,H]\n"
        "    lm_head_weight (Tensor | None): [V,H]\n"
        "    lm_head_bias (Tensor | None): [V]\n"
        "    **kwargs (Any): `final_logit_softcapping` caps logits that are not given; others have no effect,\n"
        "        as in transformers\n"
        "\n"
        "Returns:\n"
        "    Tensor: float32 (float64 for float64), a scalar"),
    "fusedloss.integrations.transformers patch": (
        "Args:\n"
        "    model (nn.Module): of transformers, with an output layer; or of PEFT around one\n"
        "    method (Literal[\"auto\", \"eager\", \"tiles\", \"chunks\", \"recompute\", \"product\"]): \"eager\", \"tiles\",\n"
        "        \"chunks\", \"recompute\", \"product\", or by `plan`\n"
        "    memory_budget (int | None): bytes beyond the gradients\n"
        "    accumulate (Literal[\"auto\", \"float32\", \"native\"]): chunks of dw add up in \"float32\", \"native\",\n"
        "        or by the plan\n"
        "\n"
        "Returns:\n"
        "    nn.Module: the same model"),
    "fusedloss.integrations.transformers unpatch": (
        "Args:\n"
        "    model (nn.Module): that `patch` has changed, or not\n"
        "\n"
        "Returns:\n"
        "    nn.Module: the same model"),
    "fusedloss.integrations.trl patch": (
        "Returns:\n"
        "    tuple[str, ...]: the names that are replaced"),
    "fusedloss.integrations.trl unpatch": (
        "Returns:\n"
        "    tuple[str, ...]: the names that mean TRL's own functions again"),
    "fusedloss.iota iota_cross_entropy": (
        "Args:\n"
        "    input (Tensor): [..., V, ...] scores\n"
        "    target (Tensor): integers in [0, V) or `ignore_index`, input's shape without `dim`\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over valid tokens, or \"sum\"\n"
        "    ignore_index (int): tokens with this target count nothing\n"
        "    dim (int): the classes' dimension\n"
        "\n"
        "Returns:\n"
        "    Tensor: float32 (float64 for float64), a scalar or target's shape"),
    "fusedloss.iota onehot_select": (
        "Args:\n"
        "    z (Tensor): [..., V, ...], V along `dim`\n"
        "    y (Tensor): integers, z's shape without `dim`\n"
        "    dim (int): the classes' dimension\n"
        "\n"
        "Returns:\n"
        "    Tensor: y's shape, z's dtype"),
    "fusedloss.iota rewrite_gather": (
        "Args:\n"
        "    gm (fx.GraphModule): ATen operations, as AOTAutograd or `make_fx` give them; changed\n"
        "\n"
        "Returns:\n"
        "    fx.GraphModule: the same module"),
    "fusedloss.lattices LabelFrames": (
        "Args:\n"
        "    score (Tensor): [N] the path's log-probability; −∞ where no path exists\n"
        "    frames (Tensor): [N,U] int64 frame in which it says each label; −1 beyond the labels, and where\n"
        "        no path exists\n"
        "    label_scores (Tensor): [N,U] log-probability of each label there; 0 where the frame is −1"),
    "fusedloss.lattices TransducerLoss": (
        "Args:\n"
        "    blank (int): its class; negative: from the end\n"
        "    clamp (float): each number of the gradient of a loss is kept within ±clamp, before the upstream\n"
        "        gradient; not above 0: off\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\"; \"sum\"; \"mean\" over sequences\n"
        "    fused_log_softmax (bool): False: the logits are log-probabilities"),
    "fusedloss.lattices TransducerLoss.forward": (
        "Args:\n"
        "    logits (Tensor): [N,T,U+1,V] of the joint network; fp16, bf16, fp32, fp64\n"
        "    targets (Tensor): [N,U] labels; what is beyond a length is not looked at\n"
        "    logit_lengths (Tensor | Sequence[int]): [N] frames, at least 1; [N] labels\n"
        "    target_lengths (Tensor | Sequence[int]): [N] frames, at least 1; [N] labels\n"
        "\n"
        "Returns:\n"
        "    Tensor: [N] with \"none\", else a scalar"),
    "fusedloss.lattices transducer_align": (
        "Args:\n"
        "    logits (Tensor): [N,T,U+1,V] of the joint network; fp16, bf16, fp32, fp64\n"
        "    targets (Tensor): [N,U] labels; what is beyond a length is not looked at\n"
        "    logit_lengths (Tensor | Sequence[int]): [N] frames, at least 1; [N] labels\n"
        "    target_lengths (Tensor | Sequence[int]): [N] frames, at least 1; [N] labels\n"
        "    blank (int): its class; negative: from the end\n"
        "    fused_log_softmax (bool): False: the logits are log-probabilities\n"
        "\n"
        "Returns:\n"
        "    LabelFrames"),
    "fusedloss.lattices transducer_decode": (
        "Args:\n"
        "    encoder (Tensor): [N,T,...] what the encoder says of each frame\n"
        "    encoder_lengths (Tensor | Sequence[int]): [N] frames\n"
        "    predict (Callable[[Tensor | None, Any], tuple[Any, Any]]): (labels [N], state) to (outputs,\n"
        "        state); (None, None) before the first label\n"
        "    joint (Callable[[Tensor, Any], Tensor]): (frames [N,...], outputs of `predict`) to logits [N,V]\n"
        "    blank (int): its class; negative: from the end\n"
        "    max_symbols (int): labels in one frame, at most\n"
        "    beam_size (int): label sequences that are kept; 1: one path alone\n"
        "    k (int): label sequences to return, at most `beam_size`\n"
        "\n"
        "Returns:\n"
        "    Hypotheses: [N,k,...]"),
    "fusedloss.lattices transducer_loss": (
        "Args:\n"
        "    logits (Tensor): [N,T,U+1,V] of the joint network; fp16, bf16, fp32, fp64\n"
        "    targets (Tensor): [N,U] labels; what is beyond a length is not looked at\n"
        "    logit_lengths (Tensor | Sequence[int]): [N] frames, at least 1; [N] labels\n"
        "    target_lengths (Tensor | Sequence[int]): [N] frames, at least 1; [N] labels\n"
        "    blank (int): its class; negative: from the end\n"
        "    clamp (float): each number of the gradient of a loss is kept within ±clamp, before the upstream\n"
        "        gradient; not above 0: off\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\"; \"sum\"; \"mean\" over sequences\n"
        "    fused_log_softmax (bool): False: the logits are log-probabilities\n"
        "\n"
        "Returns:\n"
        "    Tensor: [N] or a scalar, float32 (float64 for float64)"),
    "fusedloss.linear_ctc linear_ctc_loss": (
        "Args:\n"
        "    input (Tensor): [T,N,H] or [T,H]; fp16, bf16, fp32, fp64\n"
        "    linear_weight (Tensor | nn.Module): [V,H], or an `nn.Linear` or `nn.Embedding` that has it\n"
        "    targets (Tensor): [N,L], or [sum of target_lengths] one after another\n"
        "    input_lengths (Tensor | Sequence[int] | None): [N] frames: a tensor, a tuple or a list; None:\n"
        "        all\n"
        "    target_lengths (Tensor | Sequence[int] | None): [N] labels; None: of each all but negative ones\n"
        "        at its end\n"
        "    linear_bias (Tensor | None): of the linear layer, [V]\n"
        "    blank (int): the class that stands for no label\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\"; \"sum\"; \"mean\" of losses over their target's\n"
        "        length\n"
        "    zero_infinity (bool): 0 instead of +∞ where no alignment exists\n"
        "    memory_budget (int | None): bytes beyond the gradients, autocast's 16-bit copies included; an\n"
        "        eighth of stored logits'\n"
        "\n"
        "Returns:\n"
        "    Tensor: [N] or a scalar, float32 (float64 for float64)"),
    "fusedloss.logprobs LogProbs": (
        "Args:\n"
        "    log_probs (Tensor): natural logarithms, of the target's shape, differentiable\n"
        "    entropy (Tensor | None): of all classes, nats, one for each row, differentiable; None unless\n"
        "        asked for\n"
        "    mean_logits (Tensor | None): of the scores over all classes, one for each row, detached; None\n"
        "        unless asked for\n"
        "    target_rank (Tensor | None): int64, 0 for the highest score; None unless asked for"),
    "fusedloss.logprobs linear_log_probs": (
        "Args:\n"
        "    input (Tensor): what the linear layer multiplies, [..., H]\n"
        "    linear_weight (Tensor | nn.Module): [V,H], or an `nn.Linear` or `nn.Embedding` that has it\n"
        "    target (Tensor): [...], or [..., K] for K classes a row; integers in [0, V), or `ignore_index`\n"
        "    linear_bias (Tensor | None): of the linear layer, [V]\n"
        "    temperature (float | Tensor): T, or one for each token; divides the scores\n"
        "    logit_scale (float | Tensor): multiplies the logits, bias and all; a 0-dim tensor gets a\n"
        "        gradient\n"
        "    softcap (float | None): c: scores are c · tanh(scaled logits / c), before the temperature\n"
        "    entropy (bool): also the entropy of each token's softmax\n"
        "    mean_logits (bool): also the mean of each token's scores\n"
        "    target_rank (bool): also the target's rank among the classes; not with K of them\n"
        "    ignore_index (int): tokens with this target give 0, and have no gradient\n"
        "    max_valid (int | None): a promise: no more tokens than this are not ignored\n"
        "    batch_invariant (bool): a token's values have the same bits in every batch\n"
        "    memory_budget (int | None): bytes beyond the gradients, autocast's 16-bit copies included; by\n"
        "        default 256 MiB\n"
        "\n"
        "Returns:\n"
        "    LogProbs: float32 (float64 for float64)"),
    "fusedloss.logprobs log_probs": (
        "Args:\n"
        "    logits (Tensor): [..., V], classes last\n"
        "    target (Tensor): [...], or [..., K] for K classes a row; integers in [0, V), or `ignore_index`\n"
        "    temperature (float | Tensor): T, or one for each token; divides the scores\n"
        "    logit_scale (float | Tensor): multiplies the logits; a 0-dim tensor gets a gradient\n"
        "    softcap (float | None): c: scores are c · tanh(scaled logits / c), before the temperature\n"
        "    entropy (bool): also the entropy of each token's softmax\n"
        "    mean_logits (bool): also the mean of each token's scores\n"
        "    target_rank (bool): also the target's rank among the classes; not with K of them\n"
        "    ignore_index (int): tokens with this target give 0, and have no gradient\n"
        "\n"
        "Returns:\n"
        "    LogProbs: float32 (float64 for float64)"),
    "fusedloss.losses LinearCrossEntropyLoss": (
        "Args:\n"
        "    in_features (int): features of a token, H\n"
        "    num_classes (int): classes, V\n"
        "    bias (bool): whether the layer has one\n"
        "    shift (int): k: the target of a token lies k positions ahead\n"
        "    method (Literal[\"auto\", \"eager\", \"tiles\", \"chunks\", \"recompute\", \"product\"]): \"eager\", \"tiles\",\n"
        "        \"chunks\", \"recompute\", \"product\", or by `plan`\n"
        "    filter_eps (float | None): tiles of smaller p: by their mean in dx, dw\n"
        "    backbone_reduction (Literal[\"mean\", \"sum\"] | None): of input's wrapper, over ranks\n"
        "    matmul_dtype (torch.dtype | None): torch.float8_e4m3fn: backward matmuls in FP8\n"
        "    ignore_index (int): tokens with this target count nothing\n"
        "    label_smoothing (float): share of the target spread over all classes\n"
        "    logit_scale (float | Tensor): multiplies the logits, bias and all; a 0-dim tensor, of any sign,\n"
        "        gets a gradient\n"
        "    softcap (float | None): c: scores are c · tanh(scaled logits / c), undivided by a temperature T:\n"
        "        that is s/T, c/T\n"
        "    z_loss (float): weight of lse² in each token's loss\n"
        "    class_weight (Tensor | None): [V]\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\" is not for chunks\n"
        "    chunk_size (int | None): rows of logits in memory at once\n"
        "    memory_budget (int | None): bytes beyond the gradients\n"
        "    accumulate (Literal[\"auto\", \"float32\", \"native\"]): where chunks of dw add up: in \"float32\",\n"
        "        \"native\", or by the plan\n"
        "    init_method (Callable | None): fills [V,H] in place; as `nn.Linear` if None\n"
        "    transposed (bool): store the weight as [H,V]\n"
        "    monitoring (bool): keep statistics of the last call in `metrics`\n"
        "    device (torch.device | str | int | None): of the weight\n"
        "    dtype (torch.dtype | None): of the weight"),
    "fusedloss.losses linear_cross_entropy": (
        "Args:\n"
        "    input (Tensor): what the linear layer multiplies, [..., H]\n"
        "    linear_weight (Tensor | nn.Module): [V,H], or an `nn.Linear` or `nn.Embedding` that has it\n"
        "    target (Tensor): [...] or [..., K], integers in [0, V), or `ignore_index`; or probabilities\n"
        "        [..., V]\n"
        "    linear_bias (Tensor | None): of the linear layer, [V]\n"
        "    weight (Tensor | None): [V], of classes; without gradient\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over the weights of valid tokens, or\n"
        "        \"sum\"\n"
        "    token_weight (Tensor | None): [...]; without gradient\n"
        "    target_weight (Tensor | None): [K], of the targets of a token; without gradient\n"
        "    shift (int): k: the target of a token lies k positions ahead, in the last dimension\n"
        "    method (Literal[\"auto\", \"eager\", \"tiles\", \"chunks\", \"recompute\", \"product\"]): \"eager\", \"tiles\",\n"
        "        \"chunks\", \"recompute\", \"product\", or by `plan`\n"
        "    memory_budget (int | None): bytes beyond the gradients, autocast's 16-bit copies included\n"
        "    accumulate (Literal[\"auto\", \"float32\", \"native\"]): chunks of dw add up in \"float32\", \"native\",\n"
        "        or by the plan\n"
        "    filter_eps (float | None): tiles of smaller p: by their mean in dx, dw\n"
        "    max_valid (int | None): a promise: no more tokens than this are not ignored\n"
        "    backbone_reduction (Literal[\"mean\", \"sum\"] | None): of input's wrapper, over ranks\n"
        "    return_stats (bool): `(loss, CrossEntropyStats)`; of named chunks without gradient\n"
        "    matmul_dtype (torch.dtype | None): torch.float8_e4m3fn: backward matmuls in FP8; of bf16\n"
        "        operands\n"
        "    ignore_index (int): tokens with this target count nothing\n"
        "    label_smoothing (float): share of the target spread over all classes\n"
        "    logit_scale (float | Tensor): multiplies the logits, bias and all; a 0-dim tensor, of any sign,\n"
        "        gets a gradient\n"
        "    softcap (float | None): c: scores are c · tanh(scaled logits / c), undivided by a temperature T:\n"
        "        that is s/T, c/T\n"
        "    z_loss (float): weight of lse² in each token's loss\n"
        "\n"
        "Returns:\n"
        "    Tensor | tuple[Tensor, CrossEntropyStats]: a scalar, or [...] less `shift` at its end"),
    "fusedloss.margins AdaFace": (
        "Args:\n"
        "    margin (float): m of the formula above\n"
        "    scale (float | Tensor): of every score; a 0-dim tensor gets a gradient\n"
        "    h (float): ẑ is ±1 at a distance of σ / h from the mean\n"
        "    momentum (float): share of a new batch in the running statistics\n"
        "    reduce (Callable[[Tensor], Tensor] | None): [3] of a rank to [3] of all ranks\n"
        "    clip (tuple[float, float]): lengths outside count as these"),
    "fusedloss.margins AdaFace.moves_by": (
        "Args:\n"
        "    sums (Tensor): [3], of lengths: of one batch or of those since a step\n"
        "\n"
        "Returns:\n"
        "    Tensor: [2]"),
    "fusedloss.margins AdaFace.observe": (
        "Args:\n"
        "    norm (Tensor): [N], lengths of the rows\n"
        "    valid (Tensor): [N], rows with a label"),
    "fusedloss.margins AdaFace.quality": (
        "Args:\n"
        "    norm (Tensor): [N], lengths of the rows; 1 for a row without a label\n"
        "\n"
        "Returns:\n"
        "    Tensor"),
    "fusedloss.margins AdaFace.target_score": (
        "Args:\n"
        "    cos (Tensor): [N], of each row with its target\n"
        "    norm (Tensor): [N], lengths of the rows; 1 for a row without a label\n"
        "\n"
        "Returns:\n"
        "    Tensor"),
    "fusedloss.margins ArcFace": (
        "Args:\n"
        "    margin (float): radians, 0 to π\n"
        "    scale (float | Tensor): of every score; a 0-dim tensor gets a gradient\n"
        "    grad (str): or \"straight_through\": slope `scale`, as many models were trained\n"
        "    past_pi (str): or \"linear\": cos θ − m sin m; or \"none\": it rises again"),
    "fusedloss.margins Circle": (
        "Args:\n"
        "    margin (float): 0 to 1\n"
        "    scale (float): of every score; a 0-dim tensor gets a gradient\n"
        "    grad (Literal[\"paced\", \"exact\"]): the paper's, weights being constants; or \"exact\""),
    "fusedloss.margins Combined": (
        "Args:\n"
        "    m1 (float): above 0; 1 to 4 are usual\n"
        "    m2 (float): radians\n"
        "    m3 (float): taken off the cosine\n"
        "    scale (float | Tensor): of every score; a 0-dim tensor gets a gradient\n"
        "    grad (str): or \"straight_through\": slope `scale`, as many models were trained\n"
        "    past_pi (str): or \"linear\", where m1 is 1: cos θ − m sin m; or \"none\": it rises again"),
    "fusedloss.margins CosFace": (
        "Args:\n"
        "    margin (float): 0 to 1; 0 is a plain cosine head\n"
        "    scale (float | Tensor): of every score; a 0-dim tensor gets a gradient"),
    "fusedloss.margins Margin.observe": (
        "Args:\n"
        "    norm (Tensor): [N], lengths of the rows\n"
        "    valid (Tensor): [N], rows with a label"),
    "fusedloss.margins Margin.target_score": (
        "Args:\n"
        "    cos (Tensor): [N], of each row with its target\n"
        "    norm (Tensor | None): [N], lengths of the rows; 1 for a row without a label\n"
        "\n"
        "Returns:\n"
        "    Tensor: [N]"),
    "fusedloss.margins SubCenter": (
        "Args:\n"
        "    k (int): rows of the weight for each class\n"
        "    margin (Margin): on the nearest one's cosine"),
    "fusedloss.margins margin_cross_entropy": (
        "Args:\n"
        "    input (Tensor): [..., H], features of any length\n"
        "    linear_weight (Tensor | nn.Module): [V,H] class vectors of any length; [V·K,H] with sub-centres\n"
        "    target (Tensor): [...], integers in [0, V), or `ignore_index`\n"
        "    margin (Margin): CosFace(), ArcFace(), ...\n"
        "    weight (Tensor | None): [V], of classes; without gradient\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over the weights of valid rows, or\n"
        "        \"sum\"\n"
        "    token_weight (Tensor | None): [...], of rows; without gradient\n"
        "    ignore_index (int): rows with this target count nothing\n"
        "    eps (float): rows shorter than this have no direction\n"
        "    method (Literal[\"auto\", \"tiles\", \"recompute\"]): \"tiles\"; \"recompute\": stage 14's kernels;\n"
        "        \"auto\": where they run\n"
        "    token_tile (int): BN, rows of cosines in memory at once\n"
        "    class_tile (int): BV·K, columns of cosines in memory at once\n"
        "\n"
        "Returns:\n"
        "    Tensor: float32 (float64 for float64), a scalar or [...]"),
    "fusedloss.partial_fc ClassScores.logits": (
        "Args:\n"
        "    features (Tensor): rows to classify, [..., H]\n"
        "\n"
        "Returns:\n"
        "    Tensor: [..., V] float32 (float64 for float64)"),
    "fusedloss.partial_fc ClassScores.topk": (
        "Args:\n"
        "    features (Tensor): rows to classify, [..., H]\n"
        "    k (int): from 1 to V\n"
        "\n"
        "Returns:\n"
        "    HeadTopK: of the best classes, the best first"),
    "fusedloss.partial_fc ClassVectors.extend": (
        "Args:\n"
        "    n (int): classes more\n"
        "    *optimizers (Optimizer): whose state of the weight grows with it\n"
        "\n"
        "Returns:\n"
        "    range: the new classes"),
    "fusedloss.partial_fc ClassVectors.own_parameters": (
        "Returns:\n"
        "    list[nn.Parameter]"),
    "fusedloss.partial_fc ClassVectors.remove": (
        "Args:\n"
        "    classes (Tensor | Sequence[int]): the numbers of those to take out\n"
        "    *optimizers (Optimizer): whose state of the weight shrinks with it\n"
        "\n"
        "Returns:\n"
        "    Tensor: [V], each old class's new number, -1 if removed"),
    "fusedloss.partial_fc HeadStats": (
        "Args:\n"
        "    cos (Tensor): [N], of each row with its target, no margin (or its dot product); 0 without a\n"
        "        label\n"
        "    rest (Tensor): [N], log-sum-exp of the other scores, as corrected\n"
        "    accuracy (Tensor): share of valid rows whose target leads the classes that were scored\n"
        "    n_valid (Tensor): rows with a label\n"
        "    n_scored (Tensor): classes that were scored"),
    "fusedloss.partial_fc HeadTopK": (
        "Args:\n"
        "    values (Tensor): [..., k], scores\n"
        "    indices (Tensor): [..., k], int64, their classes"),
    "fusedloss.partial_fc PartialFC": (
        "Args:\n"
        "    num_classes (int): classes, V\n"
        "    embedding_size (int): features of a row, H\n"
        "    sample_rate (float | Literal[\"positives\"]): of the classes, in (0, 1]\n"
        "    margin (Margin | None): CosFace() unless given\n"
        "    sampler (NegativeSampler | PopularitySampler | None): in place of `sample_rate`\n"
        "    ignore_index (int): rows with this label count nothing\n"
        "    method (Literal[\"auto\", \"tiles\", \"recompute\"]): \"recompute\": the kernels; \"tiles\": PyTorch;\n"
        "        \"auto\"\n"
        "    conflict (float | None): others with a cosine above this are no negatives\n"
        "    conflict_mode (Literal[\"drop\", \"zero\"]): they leave the sum, or score 0 in it\n"
        "    sparse (bool | None): gradient as rows, for RowSparse; default: if it samples\n"
        "    eps (float): shorter rows have no direction\n"
        "    normalize (bool): whether scores are cosines; else dot products, without a margin\n"
        "    bias (bool): of each class [V,1], beside dot products\n"
        "    class_weight (Tensor | None): [V], of each class's rows in the loss; without gradient\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over the weights of valid rows, or\n"
        "        \"sum\"\n"
        "    device (torch.device | str | int | None): of the weight\n"
        "    dtype (torch.dtype | None): of the weight"),
    "fusedloss.partial_fc PartialFC.forward": (
        "Args:\n"
        "    features (Tensor): rows to classify, [..., H]\n"
        "    target (Tensor | None): [...], in [0, V), or `ignore_index`; None in eval: `logits`\n"
        "    return_stats (bool): `(loss, HeadStats)` instead of the loss\n"
        "    token_weight (Tensor | None): [...], of rows; without gradient\n"
        "\n"
        "Returns:\n"
        "    Tensor | tuple[Tensor, HeadStats]: a scalar, or [...] for \"none\""),
    "fusedloss.plans Estimate": (
        "Args:\n"
        "    method (str): its name\n"
        "    flops (float): floating-point operations\n"
        "    bytes (float): moved, read plus written\n"
        "    extra (int): bytes beyond the gradients at the peak\n"
        "    seconds (float): predicted, on the plan's machine\n"
        "    cut (tuple): a word, and the sizes it is about\n"
        "    refusal (str): why the method cannot do what the call asks; empty if it can\n"
        "    caution (str): why \"auto\" passes it over nevertheless; empty if it does not"),
    "fusedloss.plans Plan": (
        "Args:\n"
        "    call (Call)\n"
        "    estimates (tuple[Estimate, ...])\n"
        "    machine (str)\n"
        "    device (Device): its GPU; a CPU where it has none, or does not say"),
    "fusedloss.plans Plan.note": (
        "Args:\n"
        "    w (Estimate)\n"
        "\n"
        "Returns:\n"
        "    str"),
    "fusedloss.plans Plan.reason": (
        "Args:\n"
        "    w (Estimate)\n"
        "\n"
        "Returns:\n"
        "    str"),
    "fusedloss.plans plan": (
        "Args:\n"
        "    n_tokens (int): tokens, N\n"
        "    n_classes (int): classes, V\n"
        "    n_features (int): features of a token, H\n"
        "    dtype (torch.dtype): of the products\n"
        "    device (str | torch.device | None): a GPU if None, whether there is one or not\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" or \"sum\", of the loss that is planned\n"
        "    memory_budget (int | None): bytes beyond the gradients\n"
        "    accumulate (Literal[\"auto\", \"float32\", \"native\"]): chunks of dw add up in \"float32\", \"native\",\n"
        "        or by the plan\n"
        "    needs_grad (bool | tuple[bool, ...]): of input, weight and bias\n"
        "    stats (Literal[\"\", \"detached\", \"differentiable\"]): those that are wanted\n"
        "    options (tuple[str, ...]): names of other arguments in use, such as \"softcap\"; \"target_weight\":\n"
        "        several targets\n"
        "    chunk_size (int | None): rows\n"
        "    grad_dtype (torch.dtype | None): of the parameters; as `dtype` if None\n"
        "    max_valid (int | None): tokens that are not ignored, at most\n"
        "    machine (Machine | str | None): or its name, as \"H200\"; None: the GPU at hand, or an H200 where\n"
        "        there is none; for a CPU, a nominal one\n"
        "\n"
        "Returns:\n"
        "    Plan"),
    "fusedloss.row_sparse RowOptimizer.clip_grad_norm_": (
        "Args:\n"
        "    max_norm (float): the largest norm that is left as it is\n"
        "\n"
        "Returns:\n"
        "    Tensor: the norm before"),
    "fusedloss.row_sparse RowOptimizer.clip_grad_value_": (
        "Args:\n"
        "    clip_value (float): the largest magnitude of a number"),
    "fusedloss.row_sparse RowSparse": (
        "Args:\n"
        "    optimizer_class (type): torch.optim.SGD, torch.optim.AdamW or torch.optim.Adagrad\n"
        "    params (Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]): as the\n"
        "        class takes them\n"
        "    mode (Literal[\"lazy\", \"dense\"]): whether rows without gradient stay\n"
        "    rowwise (bool): row-wise Adagrad: one sum a row [V], of its gradients' mean squares\n"
        "    stochastic_rounding (bool): of bfloat16 weights; their state is float32\n"
        "    seed (int): of the rounding\n"
        "    **options (Any): of the class: lr, momentum, ..."),
    "fusedloss.row_sparse RowSparse.step": (
        "Args:\n"
        "    closure (Callable[[], float] | None): makes the loss anew, as for any optimizer\n"
        "\n"
        "Returns:\n"
        "    float | None: what `closure` returned"),
    "fusedloss.row_sparse RowSparse.update": (
        "Args:\n"
        "    p (Tensor)\n"
        "    u (Update)\n"
        "    names (tuple[str, ...])"),
    "fusedloss.row_sparse clip_grad_norm_": (
        "Args:\n"
        "    parameters (Tensor | Iterable[Tensor]): those whose gradients are clipped; others are left out\n"
        "    max_norm (float): the largest norm that is left as it is; infinity: any\n"
        "    norm_type (float): p of the p-norm, above 0; infinity: the largest number\n"
        "    error_if_nonfinite (bool): `RuntimeError` for a norm of NaN or infinity; waits for the GPU\n"
        "    foreach (bool | None): as PyTorch's, for gradients that are all plain and dense\n"
        "\n"
        "Returns:\n"
        "    Tensor: a scalar, the norm before"),
    "fusedloss.row_sparse clip_grad_value_": (
        "Args:\n"
        "    parameters (Tensor | Iterable[Tensor]): those whose gradients are clipped; others are left out\n"
        "    clip_value (float): the largest magnitude of a number, at least 0\n"
        "    foreach (bool | None): as PyTorch's, for gradients that are all plain and dense"),
    "fusedloss.samples Sample": (
        "Args:\n"
        "    tokens (Tensor): int64, from 0 to V - 1\n"
        "    log_probs (Tensor): natural logarithms, of the distribution before any filter"),
    "fusedloss.samples linear_sample": (
        "Args:\n"
        "    input (Tensor): what the linear layer multiplies, [..., H]\n"
        "    linear_weight (Tensor | nn.Module): [V,H], or an `nn.Linear` or `nn.Embedding` that has it\n"
        "    linear_bias (Tensor | None): of the linear layer, [V]\n"
        "    temperature (float | Tensor): T, or one for each row; divides the scores\n"
        "    logit_scale (float | Tensor): multiplies the logits, bias and all; or a 0-dim tensor\n"
        "    softcap (float | None): c: scores are c · tanh(scaled logits / c), before the temperature\n"
        "    top_k (int | None): draw among the k largest scores alone, the lower class first of equals\n"
        "    top_p (float | None): of these among the fewest whose probabilities reach this share of theirs\n"
        "    min_p (float | None): of these among those at least this share of the largest probability\n"
        "    generator (torch.Generator | None): draws one seed a row; by default PyTorch's own of the device\n"
        "\n"
        "Returns:\n"
        "    Sample: float32 (float64 for float64), without gradients"),
    "fusedloss.scans Paths": (
        "Args:\n"
        "    score (Tensor): [N] its own score, at least float32\n"
        "    states (Tensor): [N,T+1] int64\n"
        "    edges (Tensor): [N,T] int64: j of the edge that is taken at each step"),
    "fusedloss.scans logz": (
        "Args:\n"
        "    Ms (Tensor): [T,N,C,nz] scores of edges\n"
        "    idx (Tensor): [C,nz] the state that each edge comes from; −1: no edge\n"
        "    v0 (Tensor): [N,C] scores of starting and ending in a state\n"
        "    vT (Tensor): [N,C] scores of starting and ending in a state\n"
        "    S (Semiring): the semiring: what plus and times mean\n"
        "    lengths (Tensor | None): [N] steps of each sequence; None: T\n"
        "    method (Literal[\"auto\", \"autograd\", \"loop\", \"scan\", \"fused\"]): the version; \"auto\" is the\n"
        "        fastest that runs\n"
        "\n"
        "Returns:\n"
        "    Tensor: [*components, N], of scores of 16 bits in float32"),
    "fusedloss.scans sample": (
        "Args:\n"
        "    Ms (Tensor): [T,N,C,nz] scores of edges\n"
        "    idx (Tensor): [C,nz] the state that each edge comes from; −1: no edge\n"
        "    v0 (Tensor): [N,C] scores of starting and ending in a state\n"
        "    vT (Tensor): [N,C] scores of starting and ending in a state\n"
        "    generator (torch.Generator | None): on the device of the scores\n"
        "    lengths (Tensor | None): [N]\n"
        "\n"
        "Returns:\n"
        "    Paths"),
    "fusedloss.scans viterbi": (
        "Args:\n"
        "    Ms (Tensor): [T,N,C,nz] scores of edges\n"
        "    idx (Tensor): [C,nz] the state that each edge comes from; −1: no edge\n"
        "    v0 (Tensor): [N,C] scores of starting and ending in a state\n"
        "    vT (Tensor): [N,C] scores of starting and ending in a state\n"
        "    lengths (Tensor | None): [N]\n"
        "\n"
        "Returns:\n"
        "    Paths"),
    "fusedloss.semirings CountSemiring": (
        "Args:\n"
        "    dtype (torch.dtype): or float64, exact to 2⁵³ and rounded beyond"),
    "fusedloss.semirings KBest": (
        "Args:\n"
        "    k (int): how many"),
    "fusedloss.semirings KBest.best": (
        "Args:\n"
        "    candidates (Tensor)\n"
        "\n"
        "Returns:\n"
        "    Tensor: [m, ...] to [k, ...]"),
    "fusedloss.semirings KBest.filled": (
        "Args:\n"
        "    few (Tensor)\n"
        "\n"
        "Returns:\n"
        "    Tensor"),
    "fusedloss.semirings LogSemiring.dsum": (
        "Args:\n"
        "    x (Tensor): [*components, ..., n, ...]\n"
        "    dim (int): from the end, or among the axes after the components\n"
        "\n"
        "Returns:\n"
        "    Tensor"),
    "fusedloss.semirings MaxSemiring.dsum": (
        "Args:\n"
        "    x (Tensor): [*components, ..., n, ...]\n"
        "    dim (int): from the end, or among the axes after the components\n"
        "\n"
        "Returns:\n"
        "    Tensor"),
    "fusedloss.semirings Sample": (
        "Args:\n"
        "    generator (torch.Generator | None): on the device of the scores"),
    "fusedloss.semirings Sample.dsum": (
        "Args:\n"
        "    x (Tensor): [*components, ..., n, ...]\n"
        "    dim (int): from the end, or among the axes after the components\n"
        "\n"
        "Returns:\n"
        "    Tensor"),
    "fusedloss.semirings Semiring.lift": (
        "Args:\n"
        "    scores (Tensor): [...], log weights\n"
        "\n"
        "Returns:\n"
        "    Tensor"),
    "fusedloss.semirings Semiring.mul": (
        "Args:\n"
        "    a (Tensor): [*components, ...], of shapes that broadcast\n"
        "    b (Tensor): [*components, ...], of shapes that broadcast\n"
        "\n"
        "Returns:\n"
        "    Tensor: of their common shape"),
    "fusedloss.semirings Semiring.sum": (
        "Args:\n"
        "    x (Tensor): [*components, ..., n, ...]\n"
        "    dim (int): from the end, or among the axes after the components\n"
        "\n"
        "Returns:\n"
        "    Tensor: without that axis; `zero` where n = 0"),
    "fusedloss.semirings all_paths": (
        "Args:\n"
        "    idx (Tensor): [C,nz] the state that each edge comes from; −1: no edge\n"
        "    steps (int): T\n"
        "\n"
        "Returns:\n"
        "    tuple[Tensor, Tensor]: states [P,T+1] and edges [P,T], int64; P ≤ C·nzᵀ"),
    "fusedloss.semirings brute_force": (
        "Args:\n"
        "    Ms (Tensor): [T,N,C,nz] scores of edges\n"
        "    idx (Tensor): [C,nz] the state that each edge comes from; −1: no edge\n"
        "    v0 (Tensor): [N,C] scores of starting and ending in a state\n"
        "    vT (Tensor): [N,C] scores of starting and ending in a state\n"
        "    S (Semiring): the semiring: what plus and times mean\n"
        "\n"
        "Returns:\n"
        "    Tensor: [*components, N]"),
    "fusedloss.semirings path_sum": (
        "Args:\n"
        "    Ms (Tensor): [T,N,C,nz] scores of edges\n"
        "    idx (Tensor): [C,nz] the state that each edge comes from; −1: no edge\n"
        "    v0 (Tensor): [N,C] scores of starting and ending in a state\n"
        "    vT (Tensor): [N,C] scores of starting and ending in a state\n"
        "    S (Semiring): the semiring: what plus and times mean\n"
        "\n"
        "Returns:\n"
        "    Tensor: [*components, N]"),
    "fusedloss.sharded sharded_linear_cross_entropy": (
        "Args:\n"
        "    input (Tensor): [..., H], the same on all ranks; or of tokens of this rank's own\n"
        "    linear_weight (Tensor | nn.Module): [V,H], a DTensor, Shard(0); or its rows, beside `mesh`\n"
        "    target (Tensor): [...] as the input, integers in [0, V), or `ignore_index`\n"
        "    linear_bias (Tensor | None): [V] as the weight\n"
        "    weight (Tensor | None): [V], of all classes; without gradient\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over the weights of valid tokens, or\n"
        "        \"sum\"\n"
        "    token_weight (Tensor | None): of the target's shape; without gradient\n"
        "    shift (int): k: the target of a token lies k positions ahead, in the last dimension\n"
        "    method (Literal[\"auto\", \"product\", \"recompute\"]): \"product\" where all ranks' GPUs have its\n"
        "        kernel, else \"recompute\"\n"
        "    memory_budget (int | None): bytes beyond the gradients, autocast's 16-bit copies included\n"
        "    backbone_reduction (Literal[\"mean\", \"sum\"] | None): of input's wrapper, over ranks\n"
        "    return_stats (bool): `(loss, CrossEntropyStats)`\n"
        "    mesh (DeviceMesh | None): of one dimension; the weight is this rank's rows\n"
        "    num_classes (int | None): V, likewise\n"
        "    ignore_index (int): tokens with this target count nothing\n"
        "    label_smoothing (float): share of the target spread over all classes\n"
        "    logit_scale (float | Tensor): multiplies the logits, bias and all; a 0-dim tensor, of any sign,\n"
        "        gets a gradient\n"
        "    softcap (float | None): c: scores are c · tanh(scaled logits / c), undivided by a temperature T:\n"
        "        that is s/T, c/T\n"
        "    z_loss (float): weight of lse² in each token's loss\n"
        "\n"
        "Returns:\n"
        "    Tensor | tuple[Tensor, CrossEntropyStats]: of all tokens; \"none\": of this rank's"),
    "fusedloss.sharded sharded_linear_divergence": (
        "Args:\n"
        "    input (Tensor): [..., H], the student's hidden states, the same on all ranks; or of tokens of\n"
        "        this rank's own\n"
        "    linear_weight (Tensor | nn.Module): [V,H], a DTensor, Shard(0); or its rows, beside `mesh`\n"
        "    teacher_input (Tensor): [..., H'], the teacher's hidden states of the same tokens\n"
        "    teacher_weight (Tensor | nn.Module): [V,H'], over the ranks as the student's\n"
        "    kind (Literal[\"forward_kl\", \"reverse_kl\", \"jsd\"]): \"forward_kl\": KL(p‖q), p the teacher's;\n"
        "        \"reverse_kl\": KL(q‖p); or \"jsd\"\n"
        "    beta (float): of \"jsd\", the teacher's share of the mixture; 0 is forward KL, 1 reverse KL\n"
        "    temperature (float | Tensor): T, divides the scores of both; or floats that broadcast to [...].\n"
        "        The loss is not multiplied by T²\n"
        "    logit_scale (float | Tensor): multiplies the student's logits, bias and all; a 0-dim tensor may\n"
        "        have a gradient\n"
        "    teacher_logit_scale (float): multiplies the teacher's logits\n"
        "    softcap (float | None): c: the student's scores are c · tanh(scaled logits / c), before the\n"
        "        temperature\n"
        "    teacher_softcap (float | None): the same of the teacher\n"
        "    token_weight (Tensor | None): [...]; a token of weight 0 costs nothing; without gradient\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over the token weights, or \"sum\"\n"
        "    linear_bias (Tensor | None): [V] as the weight\n"
        "    teacher_bias (Tensor | None): [V] as the weight\n"
        "    memory_budget (int | None): bytes beyond the gradients, autocast's 16-bit copies included\n"
        "    backbone_reduction (Literal[\"mean\", \"sum\"] | None): of input's wrapper, over ranks\n"
        "    mesh (DeviceMesh | None): of one dimension; the weights are this rank's rows\n"
        "    num_classes (int | None): V, likewise\n"
        "\n"
        "Returns:\n"
        "    Tensor: float32 (float64 for float64), of all tokens; \"none\": [...], of this rank's"),
    "fusedloss.sharded sharded_linear_log_probs": (
        "Args:\n"
        "    input (Tensor): [..., H], the same on all ranks; or of tokens of this rank's own\n"
        "    linear_weight (Tensor | nn.Module): [V,H], a DTensor, Shard(0); or its rows, beside `mesh`\n"
        "    target (Tensor): [...] as the input, or [..., K] for K classes a row; integers in [0, V), or\n"
        "        `ignore_index`\n"
        "    linear_bias (Tensor | None): [V] as the weight\n"
        "    temperature (float | Tensor): T, or one for each token; divides the scores\n"
        "    logit_scale (float | Tensor): multiplies the logits, bias and all; a 0-dim tensor may have a\n"
        "        gradient\n"
        "    softcap (float | None): c: scores are c · tanh(scaled logits / c), before the temperature\n"
        "    ignore_index (int): tokens with this target give 0, and have no gradient\n"
        "    entropy (bool): also the entropy of each token's softmax\n"
        "    mean_logits (bool): also the mean of each token's scores\n"
        "    target_rank (bool): also the target's rank among the classes; not with K of them\n"
        "    memory_budget (int | None): bytes beyond the gradients, autocast's 16-bit copies included\n"
        "    backbone_reduction (Literal[\"mean\", \"sum\"] | None): of input's wrapper, over ranks\n"
        "    mesh (DeviceMesh | None): of one dimension; the weight is this rank's rows\n"
        "    num_classes (int | None): V, likewise\n"
        "\n"
        "Returns:\n"
        "    LogProbs: of this rank's tokens, float32 (float64 for float64)"),
    "fusedloss.sharded sharded_linear_sample": (
        "Args:\n"
        "    input (Tensor): [..., H], the same on all ranks; or of tokens of this rank's own\n"
        "    linear_weight (Tensor | nn.Module): [V,H], a DTensor, Shard(0); or its rows, beside `mesh`\n"
        "    linear_bias (Tensor | None): [V] as the weight\n"
        "    temperature (float | Tensor): T, or one for each row; divides the scores\n"
        "    logit_scale (float | Tensor): multiplies the logits, bias and all; or a 0-dim tensor\n"
        "    softcap (float | None): c: scores are c · tanh(scaled logits / c), before the temperature\n"
        "    top_k (int | None): draw among the k largest scores alone, the lower class first of equals\n"
        "    top_p (float | None): of these among the fewest whose probabilities reach this share of theirs\n"
        "    min_p (float | None): of these among those at least this share of the largest probability\n"
        "    generator (torch.Generator | None): draws one seed a row; by default PyTorch's own of the device\n"
        "    backbone_reduction (Literal[\"mean\", \"sum\"] | None): \"sum\" or \"mean\" for plain tokens of this\n"
        "        rank's own; which of them does not matter\n"
        "    mesh (DeviceMesh | None): of one dimension; the weight is this rank's rows\n"
        "    num_classes (int | None): V, likewise\n"
        "\n"
        "Returns:\n"
        "    Sample: of this rank's tokens, float32 (float64 for float64), without gradients"),
    "fusedloss.sharded sharded_linear_topk": (
        "Args:\n"
        "    input (Tensor): [..., H], the same on all ranks; or of tokens of this rank's own\n"
        "    linear_weight (Tensor | nn.Module): [V,H], a DTensor, Shard(0); or its rows, beside `mesh`\n"
        "    k (int): classes for each token, from 1 to V; 1 is argmax\n"
        "    linear_bias (Tensor | None): [V] as the weight\n"
        "    temperature (float | Tensor): T, or one for each token; divides the scores\n"
        "    logit_scale (float | Tensor): multiplies the logits, bias and all; a 0-dim tensor may have a\n"
        "        gradient\n"
        "    softcap (float | None): c: scores are c · tanh(scaled logits / c), before the temperature\n"
        "    memory_budget (int | None): bytes beyond the results, autocast's 16-bit copies included\n"
        "    backbone_reduction (Literal[\"mean\", \"sum\"] | None): of input's wrapper, over ranks\n"
        "    mesh (DeviceMesh | None): of one dimension; the weight is this rank's rows\n"
        "    num_classes (int | None): V, likewise\n"
        "\n"
        "Returns:\n"
        "    TopK: of this rank's tokens, float32 (float64 for float64)"),
    "fusedloss.sharded_heads ShardedPartialFC": (
        "Args:\n"
        "    num_classes (int): classes of all ranks together, V\n"
        "    embedding_size (int): features of a row, H\n"
        "    mesh (DeviceMesh | None): of one dimension\n"
        "    backbone_reduction (Literal[\"mean\", \"sum\"]): of the features' wrapper: DDP, FSDP\n"
        "    equal_batch (bool): a promise: as many rows on every rank\n"
        "    seed (int): of the first weight\n"
        "    sampler (NegativeSampler | None): in place of `sample_rate`\n"
        "    device (torch.device | str | int | None): of the weight\n"
        "    sample_rate (float | Literal[\"positives\"]): of the classes, in (0, 1]\n"
        "    margin (Margin | None): CosFace() unless given\n"
        "    ignore_index (int): rows with this label count nothing\n"
        "    method (Literal[\"auto\", \"tiles\", \"recompute\"]): \"recompute\": the kernels; \"tiles\": PyTorch;\n"
        "        \"auto\"\n"
        "    conflict (float | None): others with a cosine above this are no negatives\n"
        "    conflict_mode (Literal[\"drop\", \"zero\"]): they leave the sum, or score 0 in it\n"
        "    sparse (bool | None): gradient as rows, for RowSparse; default: if it samples\n"
        "    eps (float): shorter rows have no direction\n"
        "    normalize (bool): whether scores are cosines; else dot products, without a margin\n"
        "    bias (bool): of each class [V,1], beside dot products\n"
        "    class_weight (Tensor | None): [V], of each class's rows in the loss; without gradient\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over the weights of valid rows, or\n"
        "        \"sum\"\n"
        "    dtype (torch.dtype | None): of the weight"),
    "fusedloss.sharded_heads ShardedPartialFC.new_rows": (
        "Args:\n"
        "    device (torch.device | str | int | None): of the weight\n"
        "\n"
        "Returns:\n"
        "    Tensor"),
    "fusedloss.sharded_heads ShardedRowSparse": (
        "Args:\n"
        "    optimizer_class (type): torch.optim.SGD, torch.optim.AdamW or torch.optim.Adagrad\n"
        "    params (Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]): as the\n"
        "        class takes them\n"
        "    mode (Literal[\"lazy\", \"dense\"]): whether rows without gradient stay\n"
        "    rowwise (bool): row-wise Adagrad: one sum a row [V], of its gradients' mean squares\n"
        "    stochastic_rounding (bool): of bfloat16 weights; their state is float32\n"
        "    seed (int): of the rounding\n"
        "    **options (Any): of the class: lr, momentum, ..."),
    "fusedloss.sharded_heads ShardedScores.logits": (
        "Args:\n"
        "    features (Tensor): [..., H], this rank's rows; every rank calls\n"
        "\n"
        "Returns:\n"
        "    Tensor: [..., V], float32 (float64 for float64)"),
    "fusedloss.sharded_heads ShardedScores.topk": (
        "Args:\n"
        "    features (Tensor): [..., H], this rank's rows; every rank calls\n"
        "    k (int): from 1 to V, the same on every rank\n"
        "\n"
        "Returns:\n"
        "    HeadTopK: of all ranks' classes, the best first"),
    "fusedloss.sharded_heads ignore_in_ddp": (
        "Args:\n"
        "    module (nn.Module): with heads inside, that DistributedDataParallel is going to wrap\n"
        "\n"
        "Returns:\n"
        "    nn.Module: the same module"),
    "fusedloss.sharded_heads load_insightface": (
        "Args:\n"
        "    head (PartialFC): one vector a class; over ranks every rank calls, and reads its own classes\n"
        "    files (str | PathLike | Sequence[str | PathLike]): their folder, or paths in the order of ranks"),
    "fusedloss.sharded_heads save_insightface": (
        "Args:\n"
        "    head (PartialFC): one vector a class; over ranks every rank calls, and the first one writes\n"
        "    folder (str | PathLike): made if it is not there\n"
        "    ranks (int): files, each with the classes of one rank of insightface\n"
        "    kind (Literal[\"checkpoint\", \"weight\"]): state_dict_softmax_fc, or a tensor\n"
        "\n"
        "Returns:\n"
        "    list[Path]: the files"),
    "fusedloss.tiles MemoryEfficientVocabOutput": (
        "Args:\n"
        "    proj_weight (nn.Parameter | nn.Module): [V,H], or an `nn.Linear` or `nn.Embedding`\n"
        "    tile_factor (int): a tile holds 1 / tile_factor² of the scores\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" or \"sum\"\n"
        "    margin (float): LMCL: taken off the target's cosine\n"
        "    scale (float | None): LMCL where given: what cosines are multiplied by"),
    "fusedloss.tiles MemoryEfficientVocabOutput.eval_forward": (
        "Args:\n"
        "    input (Tensor): [N,H] or [B,S,H]\n"
        "\n"
        "Returns:\n"
        "    Tensor: [N,V] or [B,S,V], in the input's dtype"),
    "fusedloss.tiles MemoryEfficientVocabOutput.forward": (
        "Args:\n"
        "    input (Tensor): [N,H] or [B,S,H]\n"
        "    target (Tensor | None): [N] or [B,S]; None in eval mode for plain scores\n"
        "\n"
        "Returns:\n"
        "    Tensor: the loss, float32 (float64 for float64); or scores"),
    "fusedloss.tiles tiled_linear_cross_entropy": (
        "Args:\n"
        "    input (Tensor): what the linear layer multiplies, [..., H]\n"
        "    linear_weight (Tensor | nn.Module): [V,H], or an `nn.Linear` or `nn.Embedding` that has it\n"
        "    target (Tensor): [...], integers in [0, V), or `ignore_index`\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\", \"mean\" over valid tokens, or \"sum\"\n"
        "    ignore_index (int): tokens with this target count nothing\n"
        "    margin (float): LMCL (arXiv 1801.09414): taken off the target's cosine\n"
        "    scale (float | None): LMCL where given: what cosines are multiplied by\n"
        "    logit_scale (float | Tensor): multiplies the scores, in fp32; a 0-dim tensor gets a gradient\n"
        "    token_tile (int): BN, rows of scores in memory at once\n"
        "    class_tile (int): BV, columns of scores in memory at once\n"
        "\n"
        "Returns:\n"
        "    Tensor: float32 (float64 for float64), a scalar or [...]"),
    "fusedloss.topk TopK": (
        "Args:\n"
        "    log_probs (Tensor): [..., k], natural logarithms, differentiable\n"
        "    indices (Tensor): [..., k] int64\n"
        "    lse (Tensor): [...], log-sum-exp of all scores, differentiable"),
    "fusedloss.topk linear_topk": (
        "Args:\n"
        "    input (Tensor): what the linear layer multiplies, [..., H]\n"
        "    linear_weight (Tensor | nn.Module): [V,H], or an `nn.Linear` or `nn.Embedding` that has it\n"
        "    k (int): classes for each token, from 1 to V; 1 is argmax\n"
        "    linear_bias (Tensor | None): of the linear layer, [V]\n"
        "    temperature (float | Tensor): T, or one for each token; divides the scores\n"
        "    logit_scale (float | Tensor): multiplies the logits, bias and all; a 0-dim tensor gets a\n"
        "        gradient\n"
        "    softcap (float | None): c: scores are c · tanh(scaled logits / c), before the temperature\n"
        "    memory_budget (int | None): bytes beyond the results, autocast's 16-bit copies included; by\n"
        "        default 64 MiB, or a 32nd of the logits if that is more\n"
        "\n"
        "Returns:\n"
        "    TopK: float32 (float64 for float64)"),
    "fusedloss.transducer linear_transducer_loss": (
        "Args:\n"
        "    encoder (Tensor): [N,T,J]; fp16, bf16, fp32, fp64\n"
        "    predictor (Tensor): [N,U+1,J]\n"
        "    linear_weight (Tensor | nn.Module): [V,J], or an `nn.Linear` or `nn.Embedding` that has it\n"
        "    targets (Tensor): [N,U], without blanks; what is beyond `target_lengths` is not read\n"
        "    encoder_lengths (Tensor | Sequence[int]): [N] frames, at least 1: a tensor, a tuple or a list;\n"
        "        on a CPU they spare a GPU the padding\n"
        "    target_lengths (Tensor | Sequence[int]): [N] labels\n"
        "    linear_bias (Tensor | None): of the linear layer, [V]\n"
        "    activation (Literal[\"tanh\", \"relu\"] | None): of encoder + predictor\n"
        "    blank (int): the class that stands for no label\n"
        "    reduction (Literal[\"none\", \"mean\", \"sum\"]): \"none\"; \"sum\"; \"mean\" over the sequences\n"
        "    fastemit_lambda (float): a label's gradient counts 1 + λ times; the loss is the same\n"
        "    clamp (float): each number of a token's gradient of a loss by its scores is kept within ±clamp,\n"
        "        before the upstream gradient; not above 0: off\n"
        "    durations (Sequence[int] | None): of a token-and-duration transducer: frames that each of the\n"
        "        weight's last rows stands for\n"
        "    sigma (float): taken from each token's log-probability, beside durations\n"
        "    memory_budget (int | None): bytes of a chunk of nodes; by default 65,536 nodes are a chunk of\n"
        "        the backward pass, or as many as 256 MiB have room for\n"
        "\n"
        "Returns:\n"
        "    Tensor: [N] or a scalar, float32 (float64 for float64)"),
}
