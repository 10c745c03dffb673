//! Turns rules and the index of a body into edits. Pure.
//!
//! ```text
//!   set > strip > max_tokens > default > seed: the first rule that names a member changes it
//!   system prompt                             messages | instructions | system, by the shape of the route
//!   upstream_model                            model
//! ```
//!
//! All occurrences of a repeated member are changed, because the backend uses the last. A stripped member
//! counts as missing: it gets its default, or a seed.

use std::ops::Range;

use serde_json::{Value, json};

use super::{ModelRules, RequestRules, SystemMode, SystemPrompt};
use crate::body::{
    ByteEdit, ContentKind, JsonIndex, JsonKind, JsonList, JsonMember, JsonPlace, removal_ranges,
};
use crate::route::BodyShape;

const LIMIT_NAMES: [&str; 4] = ["n_predict", "max_completion_tokens", "max_tokens", "max_output_tokens"];
const SEED_MEMBER: &str = "seed";
const ANTHROPIC_DEFAULT_TOKENS: u64 = 4096;

/// Rules for a body, and the members that the index must find for them.
pub(crate) struct RulePlan<'r> {
    rules: &'r ModelRules,
    request: Option<(&'r RequestRules, BodyShape)>,
    wanted: Vec<&'r str>,
}

impl<'r> RulePlan<'r> {
    /// Plans these rules for a route with this body shape; `None` if nothing has to be done.
    pub(crate) fn new(rules: &'r ModelRules, shape: Option<BodyShape>) -> Option<Self> {
        let request = match shape {
            Some(shape) if !rules.request.is_empty() => Some((&rules.request, shape)),
            _ => None,
        };
        let mut wanted = Vec::new();
        if let Some((request, shape)) = request {
            wanted.extend(request.set.iter().chain(&request.default).map(|(name, _)| name.as_str()));
            wanted.extend(request.strip.iter().map(String::as_str));
            if request.max_tokens.is_some() && shape.generates() {
                wanted.extend(LIMIT_NAMES);
            }
            if request.fresh_seed && shape.takes_seeds() {
                wanted.push(SEED_MEMBER);
            }
            let (list, member) = shape.prompt_members();
            if request.system_prompt.is_some() {
                wanted.extend(list.into_iter().chain(member));
            }
        }
        if rules.upstream_model.is_some() {
            wanted.push("model");
        }
        wanted.sort_unstable();
        wanted.dedup();
        (!wanted.is_empty()).then_some(Self { rules, request, wanted })
    }

    /// Returns whether an unreadable body must be refused.
    pub(crate) fn is_strict(&self) -> bool {
        self.request.is_some()
    }

    pub(crate) fn wanted(&self) -> &[&'r str] {
        &self.wanted
    }

    /// Returns the edits of an indexed body. `draw` is a random number for the seed.
    pub(crate) fn edits(&self, index: &JsonIndex, draw: u32) -> Vec<ByteEdit> {
        let mut draft =
            EditDraft { plan: self, index, edits: Vec::new(), inserts: Vec::new(), gone: Vec::new() };
        if let Some((request, shape)) = self.request {
            draft.apply_parameters(request, shape);
            if request.fresh_seed && shape.takes_seeds() {
                draft.add_seed(request, draw);
            }
            if let Some(prompt) = &request.system_prompt {
                draft.apply_system_prompt(prompt, shape);
            }
        }
        if let Some(model) = &self.rules.upstream_model {
            draft.set_member("model", &json!(model));
        }
        draft.finish()
    }
}

struct EditDraft<'a> {
    plan: &'a RulePlan<'a>,
    index: &'a JsonIndex,
    edits: Vec<ByteEdit>,
    inserts: Vec<(String, String)>,
    gone: Vec<&'a JsonPlace>,
}

impl<'a> EditDraft<'a> {
    fn members(&self, name: &str) -> Vec<&'a JsonMember> {
        let index = self.plan.wanted.iter().position(|wanted| *wanted == name);
        index.map(|index| self.index.named(index).collect()).unwrap_or_default()
    }

    fn replace(&mut self, range: Range<u64>, text: impl Into<String>) {
        self.edits.push(ByteEdit { range, text: text.into() });
    }

    fn set_member(&mut self, name: &str, value: &Value) {
        let members = self.members(name);
        if members.is_empty() {
            self.inserts.push((name.to_owned(), value.to_string()));
        }
        for member in members {
            self.replace(member.value.clone(), value.to_string());
        }
    }

    fn apply_parameters(&mut self, request: &RequestRules, shape: BodyShape) {
        for (name, value) in &request.set {
            self.set_member(name, value);
        }
        let is_set = |name: &str| request.set.iter().any(|(set, _)| set == name);
        let strips = |name: &str| !is_set(name) && request.strip.iter().any(|strip| strip == name);
        for name in request.strip.iter().filter(|name| !is_set(name)) {
            let members = self.members(name);
            self.gone.extend(members.into_iter().map(|member| &member.place));
        }
        for (name, value) in request.default.iter().filter(|(name, _)| !is_set(name)) {
            if strips(name) || self.members(name).is_empty() {
                self.inserts.push((name.clone(), value.to_string()));
            }
        }
        let Some(most) = request.max_tokens.filter(|_| shape.generates()) else { return };
        for name in LIMIT_NAMES.into_iter().filter(|name| !is_set(name) && !strips(name)) {
            for member in self.members(name) {
                if !is_within_limit(&member.kind, most) {
                    self.replace(member.value.clone(), most.to_string());
                }
            }
        }
        let defaulted = |name: &str| request.default.iter().any(|(default, _)| default == name);
        let told =
            |name: &str| is_set(name) || defaulted(name) || (!strips(name) && !self.members(name).is_empty());
        let unsaid = !shape.limit_members().iter().any(|name| told(name));
        if unsaid && !(shape == BodyShape::Messages && most >= ANTHROPIC_DEFAULT_TOKENS) {
            self.inserts.push((shape.limit_members()[0].to_owned(), most.to_string()));
        }
    }

    /// Sets a seed if nothing else does. llama-server takes the highest number for a random seed.
    fn add_seed(&mut self, request: &RequestRules, draw: u32) {
        let is_said = request.set.iter().chain(&request.default).any(|(name, _)| name == SEED_MEMBER);
        if is_said {
            return;
        }
        let seed = json!(draw % u32::MAX);
        let strips = request.strip.iter().any(|name| name == SEED_MEMBER);
        match self.members(SEED_MEMBER).last() {
            Some(last) if !strips => {
                if last.kind == JsonKind::Word("null".to_owned()) {
                    self.replace(last.value.clone(), seed.to_string());
                }
            }
            _ => self.inserts.push((SEED_MEMBER.to_owned(), seed.to_string())),
        }
    }

    fn apply_system_prompt(&mut self, prompt: &SystemPrompt, shape: BodyShape) {
        let (list, member) = shape.prompt_members();
        let Some(list) = list else { return };
        let lists = self.members(list);
        let in_list =
            lists.last().is_some_and(|last| system(last).is_some_and(|list| !list.system.is_empty()));
        let members = member.map(|member| self.members(member)).unwrap_or_default();
        let in_member = members.last().is_some_and(|last| last.kind != JsonKind::Word("null".to_owned()));
        if prompt.mode == SystemMode::Missing && (in_list || in_member) {
            return;
        }
        match member {
            None => {
                for list in lists {
                    self.insert_prompt(list, prompt);
                }
            }
            Some(member) => {
                if prompt.mode == SystemMode::Replace {
                    for list in lists.iter().filter_map(|member| system(member)) {
                        self.remove_system_messages(list);
                    }
                }
                if prompt.mode != SystemMode::Prepend || !in_member {
                    return self.set_member(member, &json!(prompt.text));
                }
                for member in members {
                    let start = member.value.start;
                    match &member.kind {
                        JsonKind::Text => self.prepend_to_text(start, &prompt.text),
                        JsonKind::List(list) => self.prepend_to_parts(start, list.count == 0, &prompt.text),
                        JsonKind::Word(_) | JsonKind::Object => {
                            self.replace(member.value.clone(), json!(prompt.text).to_string());
                        }
                    }
                }
            }
        }
    }

    fn remove_system_messages(&mut self, list: &JsonList) {
        let places: Vec<&JsonPlace> = list.system.iter().map(|message| &message.place).collect();
        for range in removal_ranges(&places, list.count) {
            self.replace(range, "");
        }
    }

    fn insert_prompt(&mut self, member: &JsonMember, prompt: &SystemPrompt) {
        let Some(list) = system(member) else { return };
        if prompt.mode == SystemMode::Prepend
            && let Some(first) = list.system.first()
        {
            match first.content {
                Some((at, ContentKind::Text)) => return self.prepend_to_text(at, &prompt.text),
                Some((at, ContentKind::List { is_empty })) => {
                    return self.prepend_to_parts(at, is_empty, &prompt.text);
                }
                Some((_, ContentKind::Other)) | None => {}
            }
        }
        let mut left = list.count as usize;
        if prompt.mode == SystemMode::Replace {
            self.remove_system_messages(list);
            left = left.saturating_sub(list.system.len());
        }
        let message = format!("{{\"role\":\"system\",\"content\":{}}}", json!(prompt.text));
        let comma = if left > 0 { "," } else { "" };
        let open = member.value.start + 1;
        self.replace(open..open, format!("{message}{comma}"));
    }

    fn prepend_to_text(&mut self, quote: u64, text: &str) {
        let quoted = json!(format!("{text}\n\n")).to_string();
        self.replace(quote + 1..quote + 1, &quoted[1..quoted.len() - 1]);
    }

    fn prepend_to_parts(&mut self, bracket: u64, is_empty: bool, text: &str) {
        let comma = if is_empty { "" } else { "," };
        let part = format!("{{\"type\":\"text\",\"text\":{}}}", json!(format!("{text}\n\n")));
        self.replace(bracket + 1..bracket + 1, format!("{part}{comma}"));
    }

    fn finish(mut self) -> Vec<ByteEdit> {
        self.gone.sort_by_key(|place| place.index);
        self.gone.dedup();
        for range in removal_ranges(&self.gone, self.index.count) {
            self.edits.push(ByteEdit { range, text: String::new() });
        }
        let mut comma = (self.index.count as usize) > self.gone.len();
        let mut text = String::new();
        for (name, value) in &self.inserts {
            if std::mem::replace(&mut comma, true) {
                text.push(',');
            }
            text.extend([json!(name).to_string().as_str(), ":", value]);
        }
        if !text.is_empty() {
            self.edits.push(ByteEdit { range: self.index.close..self.index.close, text });
        }
        self.edits
    }
}

fn system(member: &JsonMember) -> Option<&JsonList> {
    match &member.kind {
        JsonKind::List(list) => Some(list),
        _ => None,
    }
}

/// llama-server ignores a value that is no number, and then generates without a limit.
#[expect(clippy::cast_precision_loss, reason = "no context has more tokens than a float can count")]
fn is_within_limit(kind: &JsonKind, most: u64) -> bool {
    let JsonKind::Word(word) = kind else { return false };
    word.parse::<f64>().is_ok_and(|number| (0.0..=most as f64).contains(&number))
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
