/* Which declarations are the library's interface. Everything else is hidden. */
#ifndef TANDEM_EXPORT_H
#define TANDEM_EXPORT_H

#if defined(__GNUC__)
#define TANDEM_API __attribute__((visibility("default")))
#else
#define TANDEM_API
#endif

#endif
