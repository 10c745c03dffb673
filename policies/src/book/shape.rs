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

/// Full-attention period by architecture, from llama.cpp, for files that do not state it.
const WINDOW_PERIODS: [(&str, u64); 6] =
    [("gemma2", 2), ("gemma3", 6), ("gemma3n", 5), ("gpt-oss", 2), ("cohere2", 4), ("exaone4", 4)];

/// Numbers of a file under the key prefix of its architecture.
struct OwnNumbers<'a>(&'a GgufDescription);

impl OwnNumbers<'_> {
    fn all(&self, name: &str) -> Option<Vec<u64>> {
        let values = self.0.numbers.get(&format!("{}.{name}", self.0.architecture))?;
        Some(values.iter().map(|value| truncate_to_u64(*value)).collect())
    }

    fn one(&self, name: &str) -> Option<u64> {
        self.all(name)?.into_iter().max()
    }

    fn needed(&self, name: &str) -> Result<u64, String> {
        self.one(name).ok_or_else(|| format!("its file does not say `{}.{name}`", self.0.architecture))
    }
}

/// Returns the number of one layer, from an array with a number for each layer or one for all.
fn of_layer(values: &[u64], layer: u64) -> Option<u64> {
    let index = usize::try_from(layer).ok()?;
    if values.len() == 1 { values.first().copied() } else { values.get(index).copied() }
}

struct AttentionShape {
    heads: u64,
    head_counts: Option<Vec<u64>>,
    kv_heads: Option<Vec<u64>>,
    /// Lengths of a head's key and value; `short`: the same in windowed layers.
    lengths: (u64, u64),
    short: (u64, u64),
    /// Latent attention (MLA) caches one short row for both keys and values.
    is_latent: bool,
    window: u64,
    pattern: Option<Vec<u64>>,
    /// Each group of this many layers is windowed except its last, which has full attention.
    period: Option<u64>,
    /// Each group of this many layers is recurrent except its last, which has attention.
    attends_every: Option<u64>,
}

impl AttentionShape {
    fn from_file(own: &OwnNumbers<'_>, heads: u64, embedding: u64) -> Self {
        let key_length = own.one("attention.key_length").unwrap_or(embedding / heads);
        let value_length = own.one("attention.value_length").unwrap_or(embedding / heads);
        let latent = own.one("attention.kv_lora_rank").zip(own.all("attention.key_length_mla"));
        let pattern = own.all("attention.sliding_window_pattern");
        let period = match &pattern {
            Some(values) if values.len() == 1 => values.first().copied(),
            Some(_) => None,
            None => {
                let known = WINDOW_PERIODS.iter().find(|(name, _)| *name == own.0.architecture);
                known.map(|(_, period)| *period)
            }
        };
        let head_counts = own.all("attention.head_count");
        Self {
            heads,
            kv_heads: own.all("attention.head_count_kv").or_else(|| head_counts.clone()),
            head_counts,
            lengths: (key_length, value_length),
            short: (
                own.one("attention.key_length_swa").unwrap_or(key_length),
                own.one("attention.value_length_swa").unwrap_or(value_length),
            ),
            is_latent: latent.is_some(),
            window: own.one("attention.sliding_window").unwrap_or(0),
            pattern,
            period,
            attends_every: own.one("full_attention_interval"),
        }
    }

    fn is_windowed(&self, layer: u64) -> bool {
        self.window > 0
            && match (&self.pattern, self.period) {
                (Some(values), None) => of_layer(values, layer) == Some(1),
                (_, Some(period)) if period > 1 => layer % period < period - 1,
                (None, None) => true,
                _ => false,
            }
    }

    /// Returns a layer's cache per token; `None` for a layer without attention.
    fn layer(&self, layer: u64) -> Option<LayerShape> {
        let count = |counts: &Option<Vec<u64>>| of_layer(counts.as_ref()?, layer);
        let kv_heads = count(&self.kv_heads).unwrap_or(self.heads);
        let has_heads = count(&self.head_counts).is_none_or(|heads| heads > 0);
        let attends = self.attends_every.is_none_or(|every| (layer + 1).is_multiple_of(every.max(1)));
        if kv_heads == 0 || !has_heads || !attends {
            return None;
        }
        let windowed = self.is_windowed(layer);
        let (key, value) = if windowed { self.short } else { self.lengths };
        let (keys, values) = if self.is_latent { (key, 0) } else { (key * kv_heads, value * kv_heads) };
        Some(LayerShape { keys, values, windowed, ..LayerShape::default() })
    }
}

impl ModelShape {
    /// Reads the dimensions from a file's metadata, with llama.cpp's defaults for missing values.
    ///
    /// # Errors
    /// A required number is missing; the text names it.
    pub fn from_file(file: &GgufDescription) -> Result<Self, String> {
        let own = OwnNumbers(file);
        if file.architecture.is_empty() {
            return Err("its file does not say what it is (`general.architecture`)".to_owned());
        }
        let count = own.needed("block_count")?;
        // Draft layers (multi-token prediction) come last, and are loaded only for speculative decoding.
        let drafts = own.one("nextn_predict_layers").unwrap_or(0);
        let embedding = own.needed("embedding_length")?;
        let heads = own.needed("attention.head_count").unwrap_or(1).max(1);
        let attention = AttentionShape::from_file(&own, heads, embedding);
        let shared = own.one("attention.shared_kv_layers").unwrap_or(0);
        let kept = count - shared.max(drafts).min(count);
        let state = recurrent_state(&own);
        let layer = |layer| match attention.layer(layer) {
            Some(shape) if layer < kept => shape,
            Some(_) => LayerShape::default(),
            None => LayerShape { state, ..LayerShape::default() },
        };
        let mut layers: Vec<LayerShape> = (0..count).map(layer).collect();
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
            feed_forward: own.one("feed_forward_length").unwrap_or(4 * embedding),
            heads,
            vocabulary: length("tokenizer.ggml.tokens"),
            merges: length("tokenizer.ggml.merges"),
            context: own.one("context_length").unwrap_or(4096),
            window: attention.window,
        })
    }
}

/// Returns the 32-bit numbers of a layer's recurrent state per sequence: of its convolution and recurrence.
fn recurrent_state(own: &OwnNumbers<'_>) -> u64 {
    let one = |name: &str| own.one(name);
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
