//! Reads a file that contains only the keys of a model's `policy`, for `llama-warden policy`. Schema and
//! defaults are those of the configuration.

use std::path::Path;

use figment::Figment;
use figment::value::{Dict, Value};

use super::policy::PolicyConfig;
use super::problem::{ConfigPlace, ConfigProblem, ConfigProblems};
use super::schema;
use super::schema::validate::validate_as;
use super::source::layers::{ConfigSources, MergedTable, file_layer, last_place, load_config, type_problem};
use super::source::tree::ConfigValue;

/// Reads a file with the keys of one model's `policy`; missing keys get the compiled-in defaults. A file
/// with a single table `[policy]` is accepted, too.
///
/// # Errors
/// The file cannot be read, or a key in it is wrong.
pub fn load_policy(path: &Path) -> Result<PolicyConfig, ConfigProblems> {
    let defaults = load_config(ConfigSources::default())?.settings.defaults;
    let beneath = match defaults.get("policy") {
        Some(Value::Dict(_, dict)) => dict.clone(),
        _ => Dict::new(),
    };
    let mut layer = file_layer(path)?;
    if let ConfigValue::Table(entries) = &layer.tree.kind
        && let [only] = entries.as_slice()
        && only.key == "policy"
    {
        layer.tree = only.value.clone();
    }
    let mut tree = layer.tree.clone();
    let mut problems = validate_as(&mut tree, schema::policy_schema(), &|byte| layer.place(byte));
    layer.tree = tree;
    if problems.is_empty() {
        let merged = Figment::from(MergedTable(beneath)).merge(layer.clone());
        let layers = [layer.clone()];
        let policy: PolicyConfig = merged.extract().map_err(|error| type_problem(&layers, &error, &[]))?;
        for (memory, budgets) in [("host", policy.host), ("vram", policy.vram)] {
            let at = [memory.to_owned(), "hard".to_owned()];
            problems.extend(budgets.order_error(None).map(|wrong| {
                let place = last_place(&layers, &at).unwrap_or(ConfigPlace::Nowhere);
                ConfigProblem::new(place, wrong)
                    .with_hint(format!("`{memory}.hard` has to be the larger of the two"))
            }));
        }
        if problems.is_empty() {
            return Ok(policy);
        }
    }
    Err(ConfigProblems(problems))
}
