//! Applies rules to a request before it waits for a lease, so that the rules in force at its arrival are
//! used.
//!
//! ```text
//!   rules apply to the route --> body held whole --> index --> edits   (no room: 503, no JSON object: 400)
//!   only another name ---------> body held whole --> index --> edits   (no JSON object: passed on unchanged)
//!                    \---------> large body: the name in the held part is replaced, the rest is streamed;
//!                                a second `model` in the rest, which the backend would use, is refused
//! ```

use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::request::Parts;
use warden_policies::ModelName;

use super::{ModelRules, RulePlan};
use crate::body::intake::BodyIntake;
use crate::body::json_index::JsonIndex;
use crate::refusal::{RequestRefusal, UnreadableBody};
use crate::route::{BodyShape, target};

/// Applies the model's rules to a request whose route has a body of the given shape.
pub(crate) async fn apply_rules(
    model: &ModelName,
    rules: &ModelRules,
    shape: Option<BodyShape>,
    parts: &mut Parts,
    intake: &mut BodyIntake,
) -> Result<(), RequestRefusal> {
    if let Some(name) = &rules.upstream_model
        && let Some(target) = parts.uri.path_and_query().and_then(|target| target::with_model(target, name))
    {
        parts.uri = target.into();
    }
    let Some(plan) = RulePlan::new(rules, shape) else { return Ok(()) };
    let unreadable = |why| RequestRefusal::Unreadable { model: model.clone(), why };
    if is_multipart(&parts.headers) {
        // llama-server may read a body as a form although the gateway does not recognise it as one.
        if plan.is_strict() || !intake.is_form() {
            return Err(unreadable(UnreadableBody::NotObject));
        }
        return rename_model(rules, intake);
    }
    if !plan.is_strict() && !intake.is_whole() && intake.names_model_once() {
        return rename_model(rules, intake);
    }
    if !intake.take_all().await? {
        return Err(RequestRefusal::Busy);
    }
    match JsonIndex::from_pieces(intake.pieces(), plan.wanted()) {
        Ok(index) => intake.edit(plan.edits(&index, rand::random())),
        Err(why) if plan.is_strict() || why == UnreadableBody::Repeats => Err(unreadable(why)),
        Err(_) => Ok(()),
    }
}

/// Returns whether the body could be taken for a form by any reader of its headers.
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

fn rename_model(rules: &ModelRules, intake: &mut BodyIntake) -> Result<(), RequestRefusal> {
    rules.upstream_model.as_ref().map_or(Ok(()), |name| intake.rename(name))
}
