//! Reads a file with the keys of a single `policy`.

use std::path::Path;

use super::layers::{ConfigSources, file_tree, load_config, type_problem};
use super::tree::ConfigNode;
use crate::policy::PolicyConfig;
use crate::problem::{ConfigPlace, ConfigProblem, ConfigProblems};
use crate::schema::root::policy_schema;
use crate::schema::validate::validate_as;

/// Reads a file with the keys of one model's `policy`, for `llama-warden policy`; missing keys get the
/// compiled-in defaults. A file with a single table `[policy]` is accepted, too.
///
/// # Errors
/// The file cannot be read, or a key in it is wrong.
pub fn load_policy(path: &Path) -> Result<PolicyConfig, ConfigProblems> {
    let defaults = load_config(ConfigSources::default())?.tree;
    let mut tree = file_tree(path)?;
    if let [only] = tree.entries()
        && only.key == "policy"
    {
        tree = only.value.clone();
    }
    let problems = validate_as(&mut tree, policy_schema());
    if !problems.is_empty() {
        return Err(ConfigProblems(problems));
    }
    let mut merged = defaults.find(&["defaults", "policy"]).cloned().unwrap_or_else(ConfigNode::table);
    merged.merge(tree.clone());
    let policy: PolicyConfig = merged.read().map_err(|error| type_problem(&tree, &error, &[]))?;
    let mut problems = Vec::new();
    for (memory, budgets) in [("host", policy.host), ("vram", policy.vram)] {
        let Some(wrong) = budgets.order_error(None) else { continue };
        let place = tree.place_of(&[memory.to_owned(), "hard".to_owned()]);
        let problem = ConfigProblem::new(place.cloned().unwrap_or(ConfigPlace::Nowhere), wrong);
        problems.push(problem.with_hint(format!("`{memory}.hard` has to be the larger of the two")));
    }
    if problems.is_empty() { Ok(policy) } else { Err(ConfigProblems(problems)) }
}
