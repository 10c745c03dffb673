//! Resolves the name in a request to a model and to the rules for it.

use std::sync::Arc;

use warden_policies::{ModelName, is_pattern, pattern_matches};
use warden_supervisor::ResolveError;

use super::Exchange;
use crate::access::keys::Access;
use crate::backend::backends::Backends;
use crate::live::Live;
use crate::refusal::Refusal;
use crate::rules::{ModelRules, Name};

impl Exchange {
    /// Resolves a name for this client, and keeps the name's own rules.
    pub(super) fn resolve(&mut self, access: &Access, name: Option<&str>) -> Result<ModelName, Refusal> {
        let (model, rules) = resolve(&self.live, access, &*self.shared.upstream.backends, name)?;
        self.renamed = rules;
        Ok(model)
    }

    /// Returns the rules for requests to a model, by the requested name.
    pub(super) fn rules(&self, model: &ModelName) -> Option<&ModelRules> {
        self.renamed.as_ref().or_else(|| self.live.models.get(model)).map(|rules| &**rules)
    }
}

/// Resolves a name for this client. Returns the rules of that name, if it has its own.
pub(super) fn resolve(
    live: &Live,
    access: &Access,
    backends: &dyn Backends,
    name: Option<&str>,
) -> Result<(ModelName, Option<Arc<ModelRules>>), Refusal> {
    let exact = name.and_then(|name| live.by_name.get_key_value(name));
    let (name, meant) = match exact {
        Some(exact) => exact,
        None => match access.resolve(backends, name) {
            Ok(model) => return Ok((model, None)),
            Err(refusal) => {
                let unknown = matches!(refusal, Refusal::Resolve(ResolveError::Unknown { .. }));
                match name.filter(|_| unknown).and_then(|name| by_pattern(live, name)) {
                    Some(meant) => meant,
                    None => return Err(with_names(refusal, live, access)),
                }
            }
        },
    };
    // A key may have a right to the name or to the models that it resolves to.
    let by_name = access.may_use(&ModelName::new(name));
    let chosen = meant.choose(
        &backends.view(),
        |model| by_name || access.may_use(model),
        |model| backends.has_room(model),
        |model| backends.refuses(model),
    );
    match chosen {
        Some((model, rules)) => Ok((model.clone(), Some(Arc::clone(rules)))),
        None => Err(with_names(access.hide(backends, name), live, access)),
    }
}

/// Returns the pattern that matches a name without an entry of its own; of several, the longest.
fn by_pattern<'a>(live: &'a Live, name: &str) -> Option<(&'a String, &'a Name)> {
    let patterns = live.by_name.iter().filter(|(pattern, _)| is_pattern(pattern));
    patterns.filter(|(pattern, _)| pattern_matches(pattern, name)).max_by_key(|(pattern, _)| pattern.len())
}

/// Checks the model in a path: a name that the key has no right to is treated as no name.
pub(super) fn in_path(
    resolved: Result<ModelName, Refusal>,
    exchange: &Exchange,
    access: &Access,
) -> Result<ModelName, Refusal> {
    resolved.map_err(|refusal| match refusal {
        Refusal::Hidden(_) => Refusal::Hidden(Box::new(Refusal::Upstream { known: known(exchange, access) })),
        other => other,
    })
}

/// Returns all names that this client may know, except aliases.
pub(super) fn known(exchange: &Exchange, access: &Access) -> Vec<String> {
    let mut known = access.known(&*exchange.shared.upstream.backends);
    known.extend(shown(&exchange.live, access).cloned());
    known
}

/// Returns the names without a process of their own that this client may know, except patterns and models'
/// own names.
pub(super) fn shown<'a>(live: &'a Live, access: &'a Access) -> impl Iterator<Item = &'a String> {
    let may_use = |model: &ModelName| access.may_use(model);
    let is_own = |name: &str, meant: &Name| meant.models.iter().any(|(model, _)| model.as_str() == name);
    let names = live.by_name.iter().filter(move |(name, meant)| !is_pattern(name) && !is_own(name, meant));
    let shown = names.filter(move |(name, meant)| {
        may_use(&ModelName::new(name)) || meant.models.iter().any(|(model, _)| may_use(model))
    });
    shown.map(|(name, _)| name)
}

/// Adds these names to a refusal that lists the known names.
fn with_names(mut refusal: Refusal, live: &Live, access: &Access) -> Refusal {
    let hidden = match &mut refusal {
        Refusal::Hidden(told) => &mut **told,
        told => told,
    };
    if let Refusal::Resolve(ResolveError::Unknown { known, .. } | ResolveError::Missing { known }) = hidden {
        known.extend(shown(live, access).cloned());
    }
    refusal
}
