//! The memory-related dimensions of a model, from its GGUF file.

use std::collections::BTreeMap;

use crate::units::truncate_to_u64;

/// Metadata of a GGUF file: numbers by key, lengths of arrays, and sizes of tensors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufDescription {
    /// The architecture, such as `llama`.
    pub architecture: String,
    /// Numeric values by key; an array keeps its order.
    pub numbers: BTreeMap<String, Vec<f64>>,
    /// Lengths of arrays by key.
    pub lengths: BTreeMap<String, u64>,
    /// Name and size in bytes of each tensor.
    pub tensors: Vec<(String, u64)>,
}

/// Cache and tensors of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerShape {
    /// Key elements per token.
    pub keys: u64,
    /// Value elements per token.
    pub values: u64,
    /// The layer attends only to the tokens within the window.
    pub windowed: bool,
    /// Recurrent state per sequence, in 32-bit numbers.
    pub state: u64,
    /// Bytes of the layer's tensors, experts included.
    pub bytes: u64,
    /// Bytes of the layer's experts.
    pub experts: u64,
}

/// Dimensions of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ModelShape {
    /// The architecture, such as `llama`.
    pub architecture: String,
    /// Layers, first to last.
    pub layers: Vec<LayerShape>,
    /// Bytes of the token embeddings, which stay on the host.
    pub input: u64,
    /// Bytes of the output tensors.
    pub output: u64,
    /// The output uses the tensor of the token embeddings, so a GPU needs a copy.
    pub tied: bool,
    /// Embedding size: numbers per token between layers.
    pub embedding: u64,
    /// Largest feed-forward width of a layer.
    pub feed_forward: u64,
    /// Number of attention heads.
    pub heads: u64,
    /// Tokens in the vocabulary.
    pub vocabulary: u64,
    /// Number of merges in the vocabulary.
    pub merges: u64,
    /// Context length in tokens that the model was trained with.
    pub context: u64,
    /// Window of windowed layers in tokens.
    pub window: u64,
}

/// Period of layers with full attention by architecture, used if the file does not state the period; values
/// from llama.cpp.
const WINDOW_PERIODS: [(&str, u64); 6] =
    [("gemma2", 2), ("gemma3", 6), ("gemma3n", 5), ("gpt-oss", 2), ("cohere2", 4), ("exaone4", 4)];

impl ModelShape {
    /// Reads the dimensions from a file's metadata, with llama.cpp's defaults for missing values.
    ///
    /// # Errors
    /// A required number is missing; the text names it.
    pub fn from_file(file: &GgufDescription) -> Result<Self, String> {
        let own = |name: &str| {
            let key = format!("{}.{name}", file.architecture);
            file.numbers
                .get(&key)
                .map(|values| values.iter().map(|value| truncate_to_u64(*value)).collect::<Vec<_>>())
        };
        let one = |name: &str| own(name).and_then(|values| values.iter().copied().max());
        let needed = |name: &str| {
            one(name).ok_or_else(|| format!("its file does not say `{}.{name}`", file.architecture))
        };
        if file.architecture.is_empty() {
            return Err("its file does not say what it is (`general.architecture`)".to_owned());
        }
        let count = needed("block_count")?;
        // Draft layers (multi-token prediction) come last, and are loaded only for speculative decoding.
        let drafts = one("nextn_predict_layers").unwrap_or(0);
        let embedding = needed("embedding_length")?;
        let heads = needed("attention.head_count").unwrap_or(1).max(1);
        let of_layer = |values: &Option<Vec<u64>>, layer: u64| {
            let values = values.as_ref()?;
            let index = usize::try_from(layer).ok()?;
            if values.len() == 1 { values.first().copied() } else { values.get(index).copied() }
        };
        let kv_heads = own("attention.head_count_kv").or_else(|| own("attention.head_count"));
        let head_counts = own("attention.head_count");
        let key_length = one("attention.key_length").unwrap_or(embedding / heads);
        let value_length = one("attention.value_length").unwrap_or(embedding / heads);
        let short_key = one("attention.key_length_swa").unwrap_or(key_length);
        let short_value = one("attention.value_length_swa").unwrap_or(value_length);
        // Models with latent attention (MLA) cache one short row for both keys and values.
        let latent = one("attention.kv_lora_rank").filter(|_| own("attention.key_length_mla").is_some());
        let window = one("attention.sliding_window").unwrap_or(0);
        let pattern = own("attention.sliding_window_pattern");
        let period = match &pattern {
            Some(values) if values.len() == 1 => values.first().copied(),
            Some(_) => None,
            None => {
                WINDOW_PERIODS.iter().find(|(name, _)| *name == file.architecture).map(|(_, period)| *period)
            }
        };
        let is_windowed = |layer: u64| {
            window > 0
                && match (&pattern, period) {
                    (Some(values), None) => of_layer(&Some(values.clone()), layer) == Some(1),
                    (_, Some(period)) if period > 1 => layer % period < period - 1,
                    (None, None) => true,
                    _ => false,
                }
        };
        let shared = one("attention.shared_kv_layers").unwrap_or(0);
        let attends_every = one("full_attention_interval");
        let state = recurrent_state(&own);
        let mut layers: Vec<LayerShape> = (0..count)
            .map(|layer| {
                let kv_heads = of_layer(&kv_heads, layer).unwrap_or(heads);
                let has_heads = of_layer(&head_counts, layer).is_none_or(|heads| heads > 0);
                let attends = attends_every.is_none_or(|every| (layer + 1) % every.max(1) == 0);
                let keeps = layer < count - shared.min(count) && layer < count - drafts.min(count);
                if kv_heads == 0 || !has_heads || !attends {
                    return LayerShape { state, ..LayerShape::default() };
                }
                let windowed = is_windowed(layer);
                let (key, value) =
                    if windowed { (short_key, short_value) } else { (key_length, value_length) };
                let (keys, values) = match latent {
                    Some(_) => (key, 0),
                    None => (key * kv_heads, value * kv_heads),
                };
                if keeps {
                    LayerShape { keys, values, windowed, ..LayerShape::default() }
                } else {
                    LayerShape::default()
                }
            })
            .collect();
        let (mut input, mut output, mut has_output) = (0, 0, false);
        for (name, bytes) in &file.tensors {
            let layer =
                name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            match layer.and_then(|layer| layers.get_mut(layer)) {
                Some(layer) => {
                    layer.bytes += bytes;
                    if name.contains("_exps") {
                        layer.experts += bytes;
                    }
                }
                None if name.starts_with("output") => {
                    output += bytes;
                    has_output |= name == "output.weight";
                }
                None => input += bytes,
            }
        }
        let length = |name: &str| file.lengths.get(name).copied().unwrap_or(0);
        Ok(Self {
            architecture: file.architecture.clone(),
            layers,
            input,
            output,
            tied: !has_output,
            embedding,
            feed_forward: one("feed_forward_length").unwrap_or(4 * embedding),
            heads,
            vocabulary: length("tokenizer.ggml.tokens"),
            merges: length("tokenizer.ggml.merges"),
            context: one("context_length").unwrap_or(4096),
            window,
        })
    }
}

/// Returns the 32-bit numbers of a layer's recurrent state per sequence: of its convolution and recurrence.
fn recurrent_state(own: &impl Fn(&str) -> Option<Vec<u64>>) -> u64 {
    let one = |name: &str| own(name).and_then(|values| values.iter().copied().max());
    if let Some(head) = one("wkv.head_size") {
        let embedding = one("embedding_length").unwrap_or(0);
        return embedding * one("token_shift_count").unwrap_or(2) + embedding * head;
    }
    if let Some(cache) = one("shortconv.l_cache") {
        return one("embedding_length").unwrap_or(0) * cache.saturating_sub(1);
    }
    let (Some(kernel), Some(inner), Some(state)) =
        (one("ssm.conv_kernel"), one("ssm.inner_size"), one("ssm.state_size"))
    else {
        return 0;
    };
    let groups = one("ssm.group_count").unwrap_or(0);
    kernel.saturating_sub(1) * (inner + 2 * groups * state) + state * inner
}
