//! An operator's rules for the requests to a model: parameters to set, default or strip, a system prompt, a
//! token limit, another name for the backend. `plan` turns the rules into edits of a body.
//!
//! The rules at the arrival of a request apply, so edits are made before the request waits for a lease.
//!
//! ```text
//!   rules apply to the route --> body held whole --> index --> edits   (no room: 503, no JSON object: 400)
//!   only another name ---------> body held whole --> index --> edits   (no JSON object: passed on unchanged)
//!                    \---------> large body: the name in the held part is replaced, the rest is streamed;
//!                                a second `model` in the rest, which the backend would use, is refused
//! ```

use std::sync::Arc;
use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::request::Parts;
use serde_json::{Map, Value};
use warden_policies::ModelName;
use warden_policies::modes::{ChooseMode, OnDeath, WhileLoading};
use warden_supervisor::{FleetView, ModelState};

use self::plan::RulePlan;
use crate::body::{BodyIntake, JsonIndex};
use crate::refusal::{RequestRefusal, UnreadableBody};
use crate::route::{BodyShape, target};

mod plan;

/// Rules of one model. [`Default`] changes nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ModelRules {
    /// Changes in bodies.
    pub request: RequestRules,
    /// Model name that replaces the client's in the body, for a backend that checks the name.
    pub upstream_model: Option<String>,
    /// Handling of a request whose server dies before it has answered.
    pub on_death: OnDeath,
    /// Progress messages for a streaming client while the model loads.
    pub loading: WhileLoading,
    /// True if a remote endpoint serves the model, which gets only requests that compute an answer.
    pub remote: bool,
    /// True if the server is no llama-server. Its routes are unknown, so each request with a body counts against
    /// the model's limit of concurrent requests, on any path.
    pub other_program: bool,
    /// Time limit of an answer; `None`: the limit for all models.
    pub timeout: Option<Duration>,
    /// Description of the model in lists.
    pub listing: ListingRules,
}

/// Description of a model in lists, in addition to its process's facts. [`Default`] adds nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ListingRules {
    /// True if lists omit the model, which still serves requests.
    pub hidden: bool,
    /// Additional members of the list entry. A table is merged into an existing one; values that a process
    /// reports are not replaced.
    pub fields: Map<String, Value>,
}

impl ListingRules {
    pub(crate) fn describe(&self, entry: &mut Value) {
        for (name, value) in &self.fields {
            match (value, entry.get_mut(name)) {
                (Value::Object(more), Some(Value::Object(there))) => {
                    more.iter().for_each(|(key, value)| {
                        there.entry(key).or_insert_with(|| value.clone());
                    });
                }
                (value, None) => entry[name] = value.clone(),
                _ => {}
            }
        }
    }
}

impl ModelRules {
    /// Returns whether these rules change nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Changes in JSON bodies, on routes that generate text or count the prompt for it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestRules {
    /// Members that always get this value.
    pub set: Vec<(String, Value)>,
    /// Members that get this value if the client does not set them.
    pub default: Vec<(String, Value)>,
    /// Members that are removed.
    pub strip: Vec<String>,
    /// The operator's system prompt.
    pub system_prompt: Option<SystemPrompt>,
    /// Limit for generated tokens.
    pub max_tokens: Option<u64>,
    /// True if each generating request without a seed gets one, so that its answer can be reproduced.
    pub fresh_seed: bool,
}

impl RequestRules {
    /// Returns whether these rules change nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A system prompt that the operator adds to requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemPrompt {
    /// Text of the prompt.
    pub text: String,
    /// Combination with the client's own system prompt.
    pub mode: SystemMode,
}

/// Ways to combine the operator's system prompt with the client's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SystemMode {
    /// Adds the operator's prompt only if the client has none.
    #[default]
    Missing,
    /// Puts the operator's prompt before the client's, with an empty line between the two.
    Prepend,
    /// Replaces the client's prompt by the operator's.
    Replace,
}

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
        // llama-server may read a body as a form although the gateway does not recognise the form.
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

/// Returns whether any reader of the headers could take the body for a form.
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

/// Models behind an additional name that the operator configured.
#[derive(Clone, Debug)]
pub struct VirtualName {
    /// Models, the best first, each with its rules under this name; at least one.
    pub models: Vec<(ModelName, Arc<ModelRules>)>,
    /// Method of choosing among the models.
    pub choose: ChooseMode,
}

impl VirtualName {
    /// Chooses a model that the client may use; `None` if there is none.
    pub(crate) fn choose(
        &self,
        view: &FleetView,
        may_use: impl Fn(&ModelName) -> bool,
        has_room: impl Fn(&ModelName) -> bool,
        refuses: impl Fn(&ModelName) -> bool,
    ) -> Option<&(ModelName, Arc<ModelRules>)> {
        let allowed: Vec<_> = self.models.iter().filter(|(model, _)| may_use(model)).collect();
        let shown = |model: &ModelName| view.models.iter().find(|shown| shown.name == *model);
        let sound: Vec<_> = allowed.iter().filter(|(model, _)| !refuses(model)).copied().collect();
        let candidates = if sound.is_empty() { allowed } else { sound };
        let state = |model: &ModelName| shown(model).map(|model| model.state);
        let is_loaded = |model: &ModelName| state(model) == Some(ModelState::Loaded);
        let find =
            |wanted: &dyn Fn(&ModelName) -> bool| candidates.iter().find(|(model, _)| wanted(model)).copied();
        let best = match self.choose {
            ChooseMode::Loaded => {
                find(&is_loaded).or_else(|| find(&|model| state(model) == Some(ModelState::Loading)))
            }
            ChooseMode::Room => {
                find(&|model| is_loaded(model) || has_room(model)).or_else(|| find(&is_loaded))
            }
        };
        best.or_else(|| candidates.first().copied())
    }
}

#[cfg(test)]
mod tests {
    use warden_supervisor::ModelView;

    use super::*;
    use crate::tests::unloaded;

    fn view(states: [(ModelState, bool); 3]) -> FleetView {
        let models = ["a", "b", "c"]
            .into_iter()
            .zip(states)
            .map(|(name, (state, _))| ModelView { state, ..unloaded(&ModelName::new(name), Vec::new()) });
        FleetView { models: models.map(Arc::new).collect(), ..FleetView::default() }
    }

    #[test]
    fn the_best_that_is_there_is_taken_and_else_the_best() {
        use ModelState::{Failed, Loaded, Loading, Unloaded};
        let models = ["a", "b", "c"].map(|name| (ModelName::new(name), Arc::default()));
        let chosen = |choose, states: [(ModelState, bool); 3], allowed: &str, room: &str| {
            let name = VirtualName { models: models.to_vec(), choose };
            let is_in = |of: &str, model: &ModelName| of.contains(model.as_str());
            let refuses = |model: &ModelName| states[usize::from(model.as_str().as_bytes()[0] - b'a')].1;
            let (may_use, has_room) = (|model: &_| is_in(allowed, model), |model: &_| is_in(room, model));
            let model = name.choose(&view(states), may_use, has_room, refuses);
            model.map(|(model, _)| model.to_string()).unwrap_or_default()
        };
        let (no, yes) = (false, true);
        let some = [(Unloaded, no), (Loaded, no), (Loaded, no)];
        let none = [(Unloaded, no), (Unloaded, no), (Unloaded, no)];
        let comes = [(Unloaded, no), (Unloaded, no), (Loading, no)];
        let broken = [(Failed, yes), (Unloaded, no), (Unloaded, no)];
        let all_broken = [(Failed, yes), (Failed, yes), (Failed, yes)];
        for (choose, states, allowed, room, wanted) in [
            (ChooseMode::Loaded, some, "abc", "abc", "b"),
            (ChooseMode::Loaded, some, "ac", "", "c"),
            (ChooseMode::Loaded, none, "abc", "bc", "a"),
            (ChooseMode::Loaded, comes, "abc", "", "c"),
            (ChooseMode::Loaded, broken, "abc", "", "b"),
            (ChooseMode::Loaded, all_broken, "abc", "", "a"),
            (ChooseMode::Room, some, "abc", "a", "a"),
            (ChooseMode::Room, some, "abc", "", "b"),
            (ChooseMode::Room, none, "abc", "c", "c"),
            (ChooseMode::Room, none, "abc", "", "a"),
            (ChooseMode::Room, broken, "abc", "a", "b"),
            (ChooseMode::Room, none, "", "", ""),
        ] {
            assert_eq!(
                chosen(choose, states, allowed, room),
                wanted,
                "{choose:?} {states:?} {allowed} {room}"
            );
        }
    }
}
