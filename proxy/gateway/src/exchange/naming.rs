//! Resolves the name in a request to a model and to the rules for that name.

use std::sync::Arc;

use warden_policies::{ModelName, is_pattern, pattern_matches};
use warden_supervisor::ResolveError;

use super::state::HttpExchange;
use crate::access::ClientAccess;
use crate::backend::LeaseProvider;
use crate::refusal::RequestRefusal;
use crate::rules::{ModelRules, VirtualName};
use crate::shared::LiveConfig;

impl HttpExchange {
    /// Resolves a name for this client and stores the name's own rules, if any.
    pub(super) fn resolve(
        &mut self,
        access: &ClientAccess,
        name: Option<&str>,
    ) -> Result<ModelName, RequestRefusal> {
        let (model, rules) = resolve(&self.live, access, &*self.shared.upstream.backends, name)?;
        self.name_rules = rules;
        Ok(model)
    }

    /// Returns the rules for requests to a model: those of the requested name, or else those of the model.
    pub(super) fn rules(&self, model: &ModelName) -> Option<&ModelRules> {
        self.name_rules.as_ref().or_else(|| self.live.models.get(model)).map(|rules| &**rules)
    }
}

/// Resolves a name for this client to a model and to the name's own rules, if any.
pub(super) fn resolve(
    live: &LiveConfig,
    access: &ClientAccess,
    backends: &dyn LeaseProvider,
    name: Option<&str>,
) -> Result<(ModelName, Option<Arc<ModelRules>>), RequestRefusal> {
    let exact = name.and_then(|name| live.by_name.get_key_value(name));
    let (name, meant) = match exact {
        Some(exact) => exact,
        None => match access.resolve(backends, name) {
            Ok(model) => return Ok((model, None)),
            Err(refusal) => {
                let meant = match (&refusal, name) {
                    (RequestRefusal::Resolve(ResolveError::Unknown { .. }), Some(name)) => {
                        find_pattern(live, name)
                    }
                    _ => None,
                };
                match meant {
                    Some(meant) => meant,
                    None => return Err(add_names(refusal, live, access)),
                }
            }
        },
    };
    // A key may have a right to the name, or to the models that it resolves to.
    let by_name = access.may_use(&ModelName::new(name));
    let chosen = meant.choose(
        &backends.view(),
        |model| by_name || access.may_use(model),
        |model| backends.has_room(model),
        |model| backends.refuses_requests(model),
    );
    match chosen {
        Some((model, rules)) => Ok((model.clone(), Some(Arc::clone(rules)))),
        None => Err(add_names(access.refuse_hidden(backends, name), live, access)),
    }
}

/// Returns the longest pattern that matches a name without an entry.
fn find_pattern<'a>(live: &'a LiveConfig, name: &str) -> Option<(&'a String, &'a VirtualName)> {
    let patterns = live.by_name.iter().filter(|(pattern, _)| is_pattern(pattern));
    patterns.filter(|(pattern, _)| pattern_matches(pattern, name)).max_by_key(|(pattern, _)| pattern.len())
}

/// Checks the model named in a path. A client whose key may not use it gets the refusal for an unknown name.
pub(super) fn resolve_in_path(
    resolved: Result<ModelName, RequestRefusal>,
    exchange: &HttpExchange,
    access: &ClientAccess,
) -> Result<ModelName, RequestRefusal> {
    resolved.map_err(|refusal| match refusal {
        RequestRefusal::Hidden(_) => RequestRefusal::Hidden(Box::new(RequestRefusal::Upstream {
            known: known_names(exchange, access),
        })),
        other => other,
    })
}

/// Returns all names that this client may know, except aliases.
pub(super) fn known_names(exchange: &HttpExchange, access: &ClientAccess) -> Vec<String> {
    let mut known = access.known_names(&*exchange.shared.upstream.backends);
    known.extend(shown_names(&exchange.live, access).cloned());
    known
}

/// Returns the additional names that this client may know: no patterns, and no models.
pub(super) fn shown_names<'a>(
    live: &'a LiveConfig,
    access: &'a ClientAccess,
) -> impl Iterator<Item = &'a String> {
    let may_use = |model: &ModelName| access.may_use(model);
    let is_own =
        |name: &str, meant: &VirtualName| meant.models.iter().any(|(model, _)| model.as_str() == name);
    let names = live.by_name.iter().filter(move |(name, meant)| !is_pattern(name) && !is_own(name, meant));
    let shown = names.filter(move |(name, meant)| {
        may_use(&ModelName::new(name)) || meant.models.iter().any(|(model, _)| may_use(model))
    });
    shown.map(|(name, _)| name)
}

/// Adds the additional names that the client may know to a refusal that lists known names.
fn add_names(mut refusal: RequestRefusal, live: &LiveConfig, access: &ClientAccess) -> RequestRefusal {
    let hidden = match &mut refusal {
        RequestRefusal::Hidden(told) => &mut **told,
        told => told,
    };
    if let RequestRefusal::Resolve(ResolveError::Unknown { known, .. } | ResolveError::Missing { known }) =
        hidden
    {
        known.extend(shown_names(live, access).cloned());
    }
    refusal
}
