//! Declares metrics, so that what each is called, counts and says of itself stands in one place.

use prometheus_client::registry::{Metric, Registry, Unit};

/// Structs of labels.
macro_rules! labels {
    ($($visible:vis $name:ident { $($field:ident: $type:ty),* })*) => {$(
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prometheus_client::encoding::EncodeLabelSet)]
        $visible struct $name { $($visible $field: $type),* }
    )*};
}

/// A struct of metrics: each with its name, its unit if it has one, and its help. What else the struct holds stands in
/// parentheses behind its name.
macro_rules! families {
    (@new) => { Default::default() };
    (@new $value:expr) => { $value };
    (@unit) => { None };
    (@unit $unit:expr) => { Some($unit) };
    ($visible:vis struct $name:ident ($($other:ident: $other_type:ty),*) {
        $($field:ident: $type:ty $([$value:expr])? = $metric:literal $(in $unit:expr)?, $help:literal;)*
    }) => {
        $visible struct $name { $($other: $other_type,)* $($field: $type,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($other: Default::default(),)* $($field: families!(@new $($value)?),)* }
            }
        }

        impl $name {
            pub(super) fn register(&self, registry: &mut prometheus_client::registry::Registry) {
                $(super::families::add(registry, $metric, families!(@unit $($unit)?), $help, self.$field.clone());)*
            }
        }
    };
}

pub(super) use {families, labels};

/// The library adds `_total` to counters and the unit to what has one.
pub(super) fn add(registry: &mut Registry, name: &str, unit: Option<Unit>, help: &str, metric: impl Metric) {
    match unit {
        Some(unit) => registry.register_with_unit(name, help, unit, metric),
        None => registry.register(name, help, metric),
    }
}
