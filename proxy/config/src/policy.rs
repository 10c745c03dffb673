//! The keys of a model's `policy` and of `[shared]`.
//!
//! Keeps sizes, percentages and `auto` as written: their values depend on the machine, its GPUs and the
//! first readings of a backend. Makes no decisions.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};
use warden_policies::defaults;
use warden_policies::recycle::RecyclePolicy;
use warden_policies::schedule::DayWindows;
use warden_policies::{ByteSize, MemoryLimit};

use super::schema::{self, SectionSchema};

/// Limits at which a backend is replaced, and the ways of replacement.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[schemars(extend("additionalProperties" = false))]
pub struct PolicyConfig {
    /// Budgets on anonymous host memory, including swapped pages.
    #[serde(default)]
    #[schemars(with = "HostKeys")]
    pub host: BudgetPair,
    /// Budgets on VRAM, for each GPU separately.
    #[serde(default)]
    #[schemars(with = "VramKeys")]
    pub vram: BudgetPair,
    /// Replaced when quiet after this many requests.
    #[schemars(range(min = 1))]
    pub max_requests: Option<u64>,
    /// Replaced when quiet at this age.
    #[serde(default, deserialize_with = "optional_duration")]
    #[schemars(schema_with = "schema::age")]
    pub max_age: Option<Duration>,
    /// Times of day for replacements that can wait, in the machine's time zone: one, or a list. Hard
    /// budgets do not wait. Default: any time.
    #[serde(default)]
    #[schemars(schema_with = "schema::windows")]
    pub only: DayWindows,
    /// Limits and modes with defaults.
    #[serde(flatten)]
    #[schemars(with = "SectionSchema<defaults::Recycle>")]
    pub common: defaults::Recycle,
}

/// A soft and a hard budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BudgetPair {
    /// Above this size, the backend is replaced when quiet.
    pub soft: Option<MemoryLimit>,
    /// Above this size, the backend is drained at once.
    pub hard: Option<MemoryLimit>,
}

impl PolicyConfig {
    /// Converts the policy for decisions. Resolves percentages of the machine's memory if it is given;
    /// `auto` stays, because its value is known only when the backend has settled.
    pub fn to_recycle_policy(&self, memory: Option<ByteSize>) -> RecyclePolicy {
        RecyclePolicy {
            host_soft: self.host.soft.map(|limit| resolve_limit(limit, memory)),
            host_hard: self.host.hard.map(|limit| resolve_limit(limit, memory)),
            vram_soft: self.vram.soft,
            vram_hard: self.vram.hard,
            max_requests: self.max_requests,
            max_age: self.max_age,
            only: self.only.clone(),
            ..RecyclePolicy::new(&self.common)
        }
    }
}

fn resolve_limit(limit: MemoryLimit, total: Option<ByteSize>) -> MemoryLimit {
    total.and_then(|total| limit.resolve(total)).map_or(limit, MemoryLimit::Bytes)
}

impl BudgetPair {
    /// Describes the error if the hard budget is below the soft one. Does not compare a percentage of an
    /// unknown total with a size.
    pub fn order_error(self, total: Option<ByteSize>) -> Option<String> {
        let soft = resolve_limit(self.soft?, total);
        let hard = resolve_limit(self.hard?, total);
        let below = match (soft, hard) {
            (MemoryLimit::Bytes(soft), MemoryLimit::Bytes(hard)) => hard < soft,
            (MemoryLimit::Percent(soft), MemoryLimit::Percent(hard)) => hard < soft,
            _ => false,
        };
        below.then(|| format!("the hard budget ({hard}) is below the soft one ({soft})"))
    }
}

/// Budgets over all backends together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SharedBudgetConfig {
    /// Anonymous host memory of all backends together.
    #[schemars(with = "SharedHostKeys")]
    pub host: BudgetPair,
    /// VRAM of all backends together, on each GPU.
    #[schemars(with = "SharedVramKeys")]
    pub vram: BudgetPair,
}

/// The keys of `host` in a `policy`.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is used")]
struct HostKeys {
    /// Above this size, a backend is replaced when quiet, or within `quiet_within`. Percentages refer to
    /// the machine's memory.
    #[schemars(schema_with = "schema::budget")]
    soft: (),
    /// Above this size, it is drained at once.
    #[schemars(schema_with = "schema::budget")]
    hard: (),
}

/// The keys of `vram` in a `policy`.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is used")]
struct VramKeys {
    /// Above this size on any one GPU, a backend is replaced when quiet. Percentages refer to the GPU's
    /// memory.
    #[schemars(schema_with = "schema::budget")]
    soft: (),
    /// Above this size, it is drained at once.
    #[schemars(schema_with = "schema::budget")]
    hard: (),
}

/// The keys of `[shared.host]`.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is used")]
struct SharedHostKeys {
    /// Above this sum over all backends, the one whose replacement frees most is replaced when quiet.
    /// Percentages refer to the machine's memory.
    #[schemars(schema_with = "schema::limit")]
    soft: (),
    /// Above this sum, it is drained at once.
    #[schemars(schema_with = "schema::limit")]
    hard: (),
}

/// The keys of `[shared.vram]`.
#[derive(JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "only its schema is used")]
struct SharedVramKeys {
    /// Above this sum over all backends on any one GPU, one is replaced when quiet. Percentages refer to
    /// the GPU's memory.
    #[schemars(schema_with = "schema::limit")]
    soft: (),
    /// Above this sum, it is drained at once.
    #[schemars(schema_with = "schema::limit")]
    hard: (),
}

pub(super) fn optional_duration<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    text.map(|text| defaults::parse_duration(&text).map_err(serde::de::Error::custom)).transpose()
}
