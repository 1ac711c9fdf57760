"""Brute force twins of the functions of `kernels/sglang.py`: plain Python on nested lists, one node and one row at a time.

Same arguments, same dictionaries, lists in place of tensors. Legend: b request, n nodes of a tree (root = 0), k children
asked of each frontier node, S steps, V vocabulary; -1 is none. The two samplers add `margin`, the smallest distance of a
coin to a threshold it was compared with.
"""

import math
import struct

NONE = -1
LARGEST_Q = 1 + 5e-4  # a softmax in float32 may round this far above one


def float32(x):
    """The float32 nearest to x; a product of two of them rounds once, as it does on the device."""
    return struct.unpack("f", struct.pack("f", x))[0]


def best(scores, count):
    """Indices of the `count` highest, highest first; of equals the lower index; NaN is the lowest."""
    return sorted(range(len(scores)), key=lambda i: (-scores[i] if scores[i] == scores[i] else math.inf, i))[:count]


# -- drafting --------------------------------------------------------------------------------------------------------


def select_top_k_tokens(step, topk_p, topk_index, scores, topk):
    out = {"scores": [], "tokens": [], "parents": [], "input_ids": [], "next_scores": []}
    rows = topk if step else 1
    for b in range(len(topk_p) // rows):
        probs, tokens = topk_p[b * rows : (b + 1) * rows], topk_index[b * rows : (b + 1) * rows]
        flat_tokens = [token for row in tokens for token in row]
        if step == 0:
            products, chosen, parents = probs, list(range(topk)), list(range(-1, topk))
        else:
            products = [[float32(scores[b][r] * p) for p in probs[r]] for r in range(topk)]
            chosen = best([x for row in products for x in row], topk)
            parents = [topk + topk * topk * (step - 1) + i for i in chosen]
        flat = [x for row in products for x in row]
        out["scores"].append(products)
        out["tokens"].append(flat_tokens)
        out["parents"].append(parents)
        out["input_ids"].append([flat_tokens[i] for i in chosen])
        out["next_scores"].append([flat[i] for i in chosen])
    return out


def parent_of(flat, topk, parents):
    """Flat index of a node's parent; "root"; or None where it has none."""
    if flat < 0:
        return None
    j = flat // topk
    if j == 0:
        return "root"
    return parents[j] if j < len(parents) and parents[j] >= 0 else None


def organize_draft_results(score_list, token_list, parents_list, num_draft_token):
    parent_list, selected, drafts = [], [], []
    topk = len(token_list[0][0])
    for b in range(len(token_list[0])):
        parents = [x for step in parents_list[:-1] for x in step[b]]
        scores = [x for step in score_list for row in step[b] for x in row]
        tokens = [x for step in token_list for x in step[b]]
        rank = []  # the score, but never above the parent's
        for flat, score in enumerate(scores):
            score = -math.inf if math.isnan(score) else score
            parent = parent_of(flat, topk, parents)
            rank.append(score if parent in ("root", None) else min(score, rank[parent]))
        chosen = sorted(best(rank, num_draft_token - 1))
        parent_list.append(parents)
        selected.append(chosen)
        drafts.append([tokens[i] for i in chosen])
    return parent_list, selected, drafts


# -- tree ------------------------------------------------------------------------------------------------------------


def build_tree(
    bonus_tokens,
    parent_list,
    top_scores_index,
    draft_tokens,
    seq_lens,
    topk,
    depth,
    num_draft_tokens,
    mask_mode="full",
):
    n = num_draft_tokens
    keys = ("tree_mask", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "draft_tokens")
    out = {key: [] for key in keys}
    for b, seq_len in enumerate(seq_lens):
        selected = top_scores_index[b]
        slot = {}  # of the first node with that flat index
        for i, flat in enumerate(selected):
            slot.setdefault(flat, i + 1)
        parent = [NONE]
        for flat in selected:
            above = parent_of(flat, topk, parent_list[b])
            parent.append(0 if above == "root" else NONE if above is None else slot.get(above, NONE))
        next_token, next_sibling = [NONE] * n, [NONE] * n
        for i in range(n - 1, 0, -1):
            if parent[i] != NONE:
                next_sibling[i] = next_token[parent[i]]
                next_token[parent[i]] = i
        for i in range(n):
            row = [False] * n
            row[0] = True
            visited, at = 0, i
            while at > 0 and visited < depth:
                row[at] = True
                visited += 1
                at = parent[at]
            out["positions"].append(seq_len + visited)
            out["tree_mask"] += layout(row, seq_len, mask_mode)
        out["retrieve_index"].append([b * n + i for i in range(n)])
        out["retrieve_next_token"].append(next_token)
        out["retrieve_next_sibling"].append(next_sibling)
        out["draft_tokens"] += [bonus_tokens[b], *draft_tokens[b]]
    return out


def layout(row, seq_len, mask_mode):
    """One node's mask as it stands in memory: cells, one item of bits with column 0 lowest, or one row of int32 words."""
    if mask_mode == "full":
        return [True] * seq_len + row
    if mask_mode == "qlen_only":
        return row
    bits = sum(1 << column for column, seen in enumerate(row) if seen)
    if len(row) <= 32:
        return [bits]
    words = [(bits >> (32 * i)) & 0xFFFFFFFF for i in range((len(row) + 31) // 32)]
    return [[word - (1 << 32) if word >> 31 else word for word in words]]


def reconstruct_indices_from_tree_mask(tree_mask, seq_lens, batch, num_draft_tokens):
    n = num_draft_tokens
    out = {"positions": [], "retrieve_index": [], "retrieve_next_token": [], "retrieve_next_sibling": []}
    for b in range(batch):
        rows = [tree_mask[(b * n + i) * n : (b * n + i + 1) * n] for i in range(n)]
        left = [[j for j in range(i) if rows[i][j]] for i in range(n)]
        parent = [cells[-1] if cells else NONE for cells in left]
        child, sibling = [NONE] * n, [NONE] * n
        for i in range(n):
            for later in range(n - 1, i, -1):
                if rows[later][i]:
                    child[i] = later
                if parent[i] != NONE and parent[later] == parent[i]:
                    sibling[i] = later
        out["positions"] += [seq_lens[b] + len(cells) for cells in left]
        out["retrieve_index"].append([b * n + i for i in range(n)])
        out["retrieve_next_token"].append(child)
        out["retrieve_next_sibling"].append(sibling)
    return out


# -- verification ----------------------------------------------------------------------------------------------------


def children(node, next_token, next_sibling):
    """Children in the order in which they are tried: at most n - 1 hops from sibling to sibling."""
    n, found, at = len(next_token), [], next_token[node]
    while 0 <= at < n and len(found) < n:
        found.append(at)
        at = next_sibling[at]
    return found


def verify_tree_greedy(
    candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict, num_steps
):
    n = len(candidates[0])
    out = {"predicts": [NONE] * (len(candidates) * n), "accept_index": [], "accept_token_num": []}
    for b, tokens in enumerate(candidates):
        at, accepted = 0, [retrieve_index[b][0]]
        for _ in range(num_steps):
            wanted = target_predict[b][at]
            tried = children(at, retrieve_next_token[b], retrieve_next_sibling[b])
            matching = [child for child in tried if tokens[child] == wanted]
            if not matching:
                break
            out["predicts"][accepted[-1]] = wanted
            at = matching[0]
            accepted.append(retrieve_index[b][at])
        out["predicts"][accepted[-1]] = target_predict[b][at]
        out["accept_token_num"].append(len(accepted) - 1)
        out["accept_index"].append(accepted + [NONE] * (num_steps + 1 - len(accepted)))
    return out


def inverse_cdf(weights, uniform, margins):
    """First index whose cumulated weight exceeds uniform * total; the last positive one if rounding finds none."""
    positive = [i for i, w in enumerate(weights) if w > 0]
    if not positive:
        return NONE
    threshold, total = uniform * sum(weights), 0.0
    for i in positive[:-1]:
        total += weights[i]
        margins.append(abs(total - threshold))
        if total > threshold:
            return i
    return positive[-1]


def tree_speculative_sampling_target_only(
    candidates,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    num_steps,
    threshold_single=1.0,
    threshold_acc=1.0,
):
    n, vocab = len(candidates[0]), len(target_probs[0][0])
    margins = [math.inf]
    out = {"predicts": [NONE] * (len(candidates) * n), "accept_index": [], "accept_token_num": []}
    for b, tokens in enumerate(candidates):
        at, accepted, rejected, excluded = 0, [retrieve_index[b][0]], NONE, set()
        while len(accepted) <= num_steps:
            mass, chosen = 0.0, NONE
            for child in children(at, retrieve_next_token[b], retrieve_next_sibling[b]):
                token = tokens[child]
                p = target_probs[b][at][token] if 0 <= token < vocab else 0.0
                mass += p
                bound = mass / max(threshold_acc, 1e-9)
                margins.append(abs(bound - uniform_samples[b][at]) if p > 0 else math.inf)
                if p > 0 and (uniform_samples[b][at] < bound or p >= threshold_single):
                    chosen = child
                    break
                excluded.add((at, token))
                rejected = token if p > 0 else rejected
            if chosen == NONE:
                break
            out["predicts"][accepted[-1]] = tokens[chosen]
            at, rejected = chosen, NONE
            accepted.append(retrieve_index[b][at])
        full = len(accepted) == num_steps + 1
        residual = [p if full or (at, x) not in excluded else 0.0 for x, p in enumerate(target_probs[b][at])]
        final = inverse_cdf(residual, uniform_samples_for_final_sampling[b], margins)
        if final == NONE:
            final = rejected if rejected != NONE else vocab - 1
        out["predicts"][accepted[-1]] = final
        out["accept_token_num"].append(len(accepted) - 1)
        out["accept_index"].append(accepted + [NONE] * (num_steps + 1 - len(accepted)))
    return {**out, "margin": min(margins)}


def chain_speculative_sampling(
    draft_tokens, draft_probs, target_probs, uniform_samples, uniform_samples_for_final_sampling
):
    out, margins = {"predicts": [], "accept_token_num": []}, [math.inf]
    for b, drafts in enumerate(draft_tokens):
        vocab, emitted = len(target_probs[b][0]), []
        residual = target_probs[b][len(drafts)]
        for s, token in enumerate(drafts):
            inside = 0 <= token < vocab
            q = draft_probs[b][s][token] if inside else 0.0
            p = target_probs[b][s][token] if inside else 0.0
            if 0 < q <= LARGEST_Q:  # false for NaN
                margins.append(abs(uniform_samples[b][s] * min(q, 1.0) - p))
                if uniform_samples[b][s] * min(q, 1.0) < p:
                    emitted.append(token)
                    continue
            law = [0.0 if math.isnan(x) else x for x in draft_probs[b][s]]
            residual = [max(t - d, 0.0) for t, d in zip(target_probs[b][s], law)]
            if inside:
                residual[token] = 0.0
            break
        final = inverse_cdf(residual, uniform_samples_for_final_sampling[b], margins)
        out["accept_token_num"].append(len(emitted))
        emitted.append(final if final != NONE else vocab - 1)
        out["predicts"].append(emitted + [NONE] * (len(drafts) + 1 - len(emitted)))
    return {**out, "margin": min(margins)}


# -- truncation ------------------------------------------------------------------------------------------------------


def keep_from(probs, smallest):
    kept = [p if p >= smallest else 0.0 for p in probs]
    total = math.fsum(kept)
    return [p / total for p in kept]


def top_k_renorm_prob(probs, top_k):
    """Everything as probable as the k-th most probable token, or more."""
    out = []
    for b, row in enumerate(probs):
        k = top_k[b] if isinstance(top_k, list) else top_k
        out.append(keep_from(row, sorted(row, reverse=True)[min(k, len(row)) - 1]))
    return out


def top_p_renorm_prob(probs, top_p):
    """The fewest of the most probable tokens whose mass reaches top_p, and everything as probable as the last of them."""
    out = []
    for b, row in enumerate(probs):
        wanted, mass, smallest = top_p[b] if isinstance(top_p, list) else top_p, 0.0, 0.0
        for p in sorted(row, reverse=True):
            mass, smallest = mass + p, p
            if mass >= wanted:
                break
        out.append(keep_from(row, smallest))
    return out
