//! Rules about parameters that llama-warden changes in requests.

use serde_json::Value;

use super::{ConfigSummary, ModelSummary, RuleFinding};
use crate::arguments;
use crate::request::TOKEN_LIMIT_PARAMETERS;

/// Finds defaults above their limit, which are reduced to it, and limits above the context, which have no
/// effect.
pub(super) fn defaults_above_their_limit(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let mut found = Vec::new();
    for one in &whole.models {
        let request = &one.model.request;
        let Some(most) = request.max_tokens else { continue };
        for (table, all) in [("default", &request.default), ("set", &request.set)] {
            let above = TOKEN_LIMIT_PARAMETERS.iter().filter_map(|key| {
                let asked = all.get(*key).and_then(Value::as_u64).filter(|asked| *asked > most)?;
                Some((*key, asked))
            });
            for (key, asked) in above {
                let message = format!(
                    "`request.{table}` asks for {asked} tokens (`{key}`), and `request.max_tokens` lets {most} be generated"
                );
                let hint = format!("lower `{key}` to {most} or less, or raise `request.max_tokens`");
                found.push(one.finding(&["request", table, key], &message, hint));
            }
        }
        // A context of 0 means the model's own context, which is not known here.
        if let Some(context) = arguments::context(one.args).filter(|context| (1..=most).contains(context)) {
            let message = format!(
                "`request.max_tokens` lets {most} tokens be generated, and a process has {context} tokens of context for prompt and \
                 answer"
            );
            let hint = format!("lower `request.max_tokens` below {context}, or raise `-c` in `args`");
            found.push(one.finding(&["request", "max_tokens"], &message, hint));
        }
    }
    found
}

/// Finds defaults for parameters that are always set: such a default is never used.
pub(super) fn defaults_also_set(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let of_one = |one: &ModelSummary<'_>| -> Vec<RuleFinding> {
        let request = &one.model.request;
        let both = request.default.keys().filter(|key| request.set.contains_key(*key));
        both.map(|key| {
            let message = format!(
                "`request.set` gives every request a `{key}`, so that in `request.default` is never used"
            );
            one.finding(&["request", "default", key], &message, "keep one of the two")
        })
        .collect()
    };
    whole.models.iter().flat_map(of_one).collect()
}
