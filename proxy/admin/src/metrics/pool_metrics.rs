//! Metrics for load balancers and endpoint pickers that spread requests over several instances. All
//! describe the current moment, cover all models together unless stated otherwise, and need no request to
//! any llama-server.

use std::collections::BTreeMap;
use std::sync::Arc;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use warden_policies::pool::agent::AgentAnswer;
use warden_policies::pool::{BalancedModel, InstanceFacts, context_fill, readiness};
use warden_supervisor::{FleetView, ModelState, ModelView};

use super::families::{FloatGauge, ModelLabel, to_gauge};
use super::families::{families, labels};
use crate::clock;
use crate::pool_facts::ContextUse;

/// For endpoint pickers that count blocks. llama-server has none; a small number loses little by rounding.
const TOKENS_PER_BLOCK: u64 = 16;

labels! {
    CacheLabels { block_size: String, num_gpu_blocks: String }
    AdapterLabels { max_lora: String, running_lora_adapters: String, waiting_lora_adapters: String }
}

const END_LINE: &str = "# EOF\n";

families! {
    pub(super) struct PoolMetrics () {
        waiting: Gauge = "pool_requests_waiting", "Requests that wait for a backend.";
        running: Gauge = "pool_requests_running", "Requests on a backend.";
        slots: Gauge = "pool_slots", "Slots of processes that take requests.";
        usage: FloatGauge
            = "pool_kv_usage",
            "Share of the context of all slots that requests under way hold, 0 to 1, as far as it is known: \
             tokens of prompts (counted, or a quarter of their bytes) and of answers so far. No llama-server \
             is asked. Where slots share one context (`--kv-unified`, or no `--parallel`) it is counted \
             once.";
        of_model: Family<ModelLabel, FloatGauge> = "kv_usage", "The same for one model.";
        cache: Family<CacheLabels, Gauge>
            = "pool_cache_info", "1; the context of all slots in blocks of 16 tokens, as pickers count them.";
        models: Family<AdapterLabels, Gauge>
            = "pool_models_info",
            "Time of this report, in seconds since 1970; the models that are loaded and that are loading, by \
             each of their names (but those with a comma). Only on the probe listener. The labels are those \
             of vLLM's adapters, so that a picker prefers an instance that has the model.";
        ready: Gauge = "pool_ready", "1 if `/readyz` says 200.";
        draining: Gauge
            = "pool_draining", "1 while it drains, after `llama-warden drain --all` or SIGTERM, and still \
                                serves new requests.";
        weight: Gauge = "pool_weight", "Percent of its weight, as reported to `HAProxy`; 0 to get no requests.";
    }
}

families! {
    pub(super) struct VllmMetrics () {
        waiting: Gauge = "vllm:num_requests_waiting", "As `llama_warden_pool_requests_waiting`. These only \
            with `probe.vllm`.";
        running: Gauge = "vllm:num_requests_running", "As `llama_warden_pool_requests_running`.";
        usage: FloatGauge = "vllm:kv_cache_usage_perc", "As `llama_warden_pool_kv_usage`.";
        cache: Family<CacheLabels, Gauge>
            = "vllm:cache_config_info", "As `llama_warden_pool_cache_info`.";
        adapters: Family<AdapterLabels, Gauge>
            = "vllm:lora_requests_info", "As `llama_warden_pool_models_info`.";
    }
}

/// The pool metrics under our names and, if wanted, under vLLM's.
#[derive(Default)]
pub(super) struct PoolExport {
    pub(super) metrics: PoolMetrics,
    vllm: VllmMetrics,
    /// Metrics with vLLM's names, which have another prefix.
    foreign: Registry,
}

impl PoolExport {
    pub(super) fn register(&mut self, registry: &mut Registry) {
        self.metrics.register(registry);
        self.vllm.register(&mut self.foreign);
    }

    pub(super) fn read(&self, text: &mut String, pool: &PoolSnapshot, view: &FleetView) -> std::fmt::Result {
        let labels = PoolLabels::from_pool(pool, view, clock::now().as_second());
        self.metrics.read(pool, &labels);
        if pool.vllm {
            self.vllm.read(pool, &labels);
            encode(text, &self.foreign)?;
            // The text may have only one end line, which the other metrics add later.
            text.truncate(text.strip_suffix(END_LINE).map_or(text.len(), str::len));
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct PoolSnapshot {
    pub(crate) facts: InstanceFacts,
    pub(crate) contexts: BTreeMap<String, ContextUse>,
    /// Answer to `agent-check` of `HAProxy`; `None`: unknown.
    pub(crate) line: Option<AgentAnswer>,
    /// The metrics with vLLM's names are exported, too.
    pub(crate) vllm: bool,
    /// Endpoint pickers read the metrics. Only they need the loaded models as a label, and each change of
    /// this label creates a new series.
    pub(crate) pickers: bool,
}

impl PoolSnapshot {
    fn sum(&self, of: fn(&BalancedModel) -> u32) -> u64 {
        self.facts.models.iter().map(|model| u64::from(of(model))).sum()
    }

    fn context(&self) -> ContextUse {
        let add = |all: ContextUse, one: &ContextUse| ContextUse {
            used: all.used.saturating_add(one.used),
            room: all.room.saturating_add(one.room),
        };
        self.contexts.values().fold(ContextUse::default(), add)
    }
}

/// Labels with the size of the context and the names of loaded models.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PoolLabels {
    cache: CacheLabels,
    models: AdapterLabels,
    /// Current time in seconds since 1970.
    now: i64,
}

impl PoolLabels {
    pub(super) fn from_pool(pool: &PoolSnapshot, view: &FleetView, now: i64) -> Self {
        let blocks = pool.context().room / TOKENS_PER_BLOCK;
        // Include aliases, because a client may use any of them.
        let all_names = |model: &Arc<ModelView>| {
            let aliases = model.aliases.iter().map(ToString::to_string);
            let all = std::iter::once(model.name.to_string()).chain(aliases);
            // Leave out a name with a comma, which would be read as two names.
            all.filter(|name| !name.contains(',')).collect::<Vec<_>>()
        };
        let named = |state: ModelState| {
            let of = view.models.iter().filter(|model| model.state == state);
            of.flat_map(all_names).collect::<Vec<_>>().join(",")
        };
        Self {
            cache: CacheLabels {
                block_size: TOKENS_PER_BLOCK.to_string(),
                num_gpu_blocks: blocks.to_string(),
            },
            models: AdapterLabels {
                max_lora: view.models.iter().flat_map(all_names).count().to_string(),
                running_lora_adapters: named(ModelState::Loaded),
                waiting_lora_adapters: named(ModelState::Loading),
            },
            now,
        }
    }

    fn write_to(&self, cache: &Family<CacheLabels, Gauge>, models: &Family<AdapterLabels, Gauge>) {
        cache.clear();
        cache.get_or_create(&self.cache).set(1);
        models.clear();
        models.get_or_create(&self.models).set(self.now);
    }
}

impl PoolMetrics {
    pub(super) fn read(&self, pool: &PoolSnapshot, there: &PoolLabels) {
        there.write_to(&self.cache, &self.models);
        if !pool.pickers {
            self.models.clear();
        }
        self.waiting.set(to_gauge(pool.sum(|model| model.waiting)));
        self.running.set(to_gauge(pool.sum(|model| model.running)));
        self.slots.set(to_gauge(pool.sum(|model| model.slots)));
        let all = pool.context();
        self.usage.set(context_fill(all.used, all.room));
        self.of_model.clear();
        for (model, context) in &pool.contexts {
            let label = ModelLabel { model: model.clone() };
            self.of_model.get_or_create(&label).set(context_fill(context.used, context.room));
        }
        self.ready.set(i64::from(readiness(&pool.facts).is_ok()));
        self.draining.set(i64::from(pool.facts.draining));
        self.weight.set(match pool.line {
            Some(AgentAnswer::Up { weight, .. }) => i64::from(weight),
            _ => 0,
        });
    }
}

impl VllmMetrics {
    pub(super) fn read(&self, pool: &PoolSnapshot, there: &PoolLabels) {
        there.write_to(&self.cache, &self.adapters);
        self.waiting.set(to_gauge(pool.sum(|model| model.waiting)));
        self.running.set(to_gauge(pool.sum(|model| model.running)));
        let all = pool.context();
        self.usage.set(context_fill(all.used, all.room));
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::registry::Registry;

    use super::*;

    fn text(registry: &Registry) -> String {
        let mut text = String::new();
        encode(&mut text, registry).unwrap();
        text
    }

    #[test]
    fn a_picker_finds_its_gauges_under_our_names_and_those_of_vllm() {
        let model = BalancedModel { slots: 4, running: 3, waiting: 2, depth: 8, ..BalancedModel::default() };
        let contexts = [
            ("a".to_owned(), ContextUse { used: 100, room: 400 }),
            ("b".to_owned(), ContextUse { used: 0, room: 400 }),
        ];
        let pool = PoolSnapshot {
            facts: InstanceFacts { models: vec![model, model], ..InstanceFacts::default() },
            contexts: contexts.into(),
            line: Some(AgentAnswer::Up { weight: 42, connections: None }),
            vllm: true,
            pickers: true,
        };
        let (ours, theirs) = (PoolMetrics::default(), VllmMetrics::default());
        let (mut own, mut other) = (Registry::default(), Registry::default());
        ours.register(&mut own);
        theirs.register(&mut other);
        let there = PoolLabels::from_pool(&pool, &FleetView::default(), 1_800_000_000);
        assert_eq!((there.cache.num_gpu_blocks.as_str(), there.models.max_lora.as_str()), ("50", "0"));
        let models = AdapterLabels {
            max_lora: "3".to_owned(),
            running_lora_adapters: "a,org/a".to_owned(),
            waiting_lora_adapters: "b".to_owned(),
        };
        let there = PoolLabels { models, ..there };
        ours.read(&pool, &there);
        theirs.read(&pool, &there);
        let (own, other) = (text(&own), text(&other));
        for line in [
            "pool_requests_waiting 4\n",
            "pool_requests_running 6\n",
            "pool_slots 8\n",
            "pool_kv_usage 0.125\n",
            "\nkv_usage{model=\"a\"} 0.25\n",
            "pool_ready 1\n",
            "pool_draining 0\n",
            "pool_weight 42\n",
            "\npool_cache_info{block_size=\"16\",num_gpu_blocks=\"50\"} 1\n",
            "\npool_models_info{max_lora=\"3\",running_lora_adapters=\"a,org/a\",waiting_lora_adapters=\"b\"} 1800000000\n",
        ] {
            assert!(own.contains(line), "{line} is missing in {own}");
        }
        for line in [
            "\nvllm:num_requests_waiting 4\n",
            "\nvllm:num_requests_running 6\n",
            "\nvllm:kv_cache_usage_perc 0.125\n",
            "\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"50\"} 1\n",
            "\nvllm:lora_requests_info{max_lora=\"3\",running_lora_adapters=\"a,org/a\",waiting_lora_adapters=\"b\"} 1800000000\n",
        ] {
            assert!(other.contains(line), "{line} is missing in {other}");
        }
    }
}
