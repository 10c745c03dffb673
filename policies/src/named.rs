//! Enums whose variants have names.

/// Defines an enum, the list of its variants, and their names. serde has its own names for JSON and the
/// configuration, which are the same.
macro_rules! named_enum {
    (
        $(#[$meta:meta])*
        pub enum $type:ident {
            $($(#[$attribute:meta])* $variant:ident = $name:literal,)*
        }
    ) => {
        $(#[$meta])*
        pub enum $type { $($(#[$attribute])* $variant,)* }

        impl $type {
            /// All variants, in the order of the enum.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// Returns the name of the variant, as in metrics, JSON and the configuration.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }
    };
}
pub(crate) use named_enum;
