//! Carries rules out on one request, before it has its lease: so a change of rules never waits in a queue.
//!
//! ```text
//!   rules mean the route --> body held whole --> index --> edits       (no room: 503, no JSON object: 400)
//!   only another name ----> body held whole --> the same, but what is no JSON object passes
//!                    \----> large: the name found in the part that is held is replaced, the rest streams;
//!                           a second `model` in the rest ends the request, or the backend would take that one
//! ```

use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::request::Parts;
use warden_policies::ModelName;

use super::{ModelRules, Plan};
use crate::body::intake::Intake;
use crate::body::json_index::JsonIndex;
use crate::refusal::{Refusal, Unreadable};
use crate::route::{Shape, target};

/// Applies the rules of the model that the request is for, on a route of this shape.
pub(crate) async fn apply(
    model: &ModelName,
    rules: &ModelRules,
    shape: Option<Shape>,
    parts: &mut Parts,
    intake: &mut Intake,
) -> Result<(), Refusal> {
    if let Some(name) = &rules.upstream_model
        && let Some(target) = parts.uri.path_and_query().and_then(|target| target::with_model(target, name))
    {
        parts.uri = target.into();
    }
    let Some(plan) = Plan::new(rules, shape) else { return Ok(()) };
    let unreadable = |why| Refusal::Unreadable { model: model.clone(), why };
    if is_multipart(&parts.headers) {
        // One that we do not take for a form may still be one for llama-server.
        if plan.is_strict() || !intake.is_form() {
            return Err(unreadable(Unreadable::NotObject));
        }
        return rename(rules, intake);
    }
    if !plan.is_strict() && !intake.is_whole() && intake.names_once() {
        return rename(rules, intake);
    }
    if !intake.take_all().await? {
        return Err(Refusal::Busy);
    }
    match JsonIndex::of(intake.pieces(), plan.wanted()) {
        Ok(index) => intake.edit(plan.edits(&index, rand::random())),
        Err(why) if plan.is_strict() || why == Unreadable::Repeats => Err(unreadable(why)),
        Err(_) => Ok(()),
    }
}

/// Whether anybody might read the body as a form.
fn is_multipart(headers: &HeaderMap) -> bool {
    let begins = |value: &HeaderValue| {
        value
            .as_bytes()
            .trim_ascii_start()
            .get(..10)
            .is_some_and(|start| start.eq_ignore_ascii_case(b"multipart/"))
    };
    headers.get_all(CONTENT_TYPE).iter().any(begins)
}

fn rename(rules: &ModelRules, intake: &mut Intake) -> Result<(), Refusal> {
    rules.upstream_model.as_ref().map_or(Ok(()), |name| intake.rename(name))
}
